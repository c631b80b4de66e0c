# Everything runs in .venv, which is created with the interpreter PYTHON.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test lint types docs serve unit browser exhaustive integration bench clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create the environment

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## search cells on handwritten digits, draw one, test them against random cells
	$(BIN)/softcell demo

# Tests sometimes wait for files and child processes; mypy and mkdocs run in parallel to use that time.
test: lint  ## ruff, mypy, the documentation and pytest
	@$(MAKE) --no-print-directory -j2 unit types docs

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)  ## build the documentation site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve: docs  ## serve it at http://127.0.0.1:8000, with working search
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

unit: $(STAMP) browser
	$(BIN)/python -m pytest -n auto --dist loadfile

# Reports are tested in a real browser. Where it cannot be installed, those tests are skipped with a reason.
browser:  ## install Chromium for the tests, where that is possible
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && echo 'installing chromium for the tests of reports' \
	  && { timeout 60 apt-get -qq update; timeout 300 apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1; } \
	  || echo 'no chromium: the tests in a browser will be skipped'

exhaustive: $(STAMP)  ## run the long tests (complete enumerations, several minutes)
	$(BIN)/python -m pytest -m exhaustive

# Slurm comes from Debian packages and Ray from PyPI. Tests of anything that cannot be installed are skipped with a reason.
integration: $(STAMP)  ## run sweeps on real Slurm and Ray clusters on this machine (several minutes)
	@command -v slurmctld >/dev/null || test -x /usr/sbin/slurmctld \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
	  && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
	  || echo 'Slurm cannot be installed: its tests will be skipped'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray>=2.40' 'submitit>=1.5' \
	  || echo 'Ray cannot be installed: its tests will be skipped'
	$(BIN)/python -m pytest tests/integration -m integration -rs

bench: $(STAMP)  ## time search steps
	$(BIN)/python -m benchmarks

clean:  ## remove the environment and build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
