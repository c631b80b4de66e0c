# Everything runs in .venv; PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test lint types unit exhaustive bench clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make the environment

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## search a cell on handwritten digits, draw it, train it beside random ones
	$(BIN)/softcell demo

test: lint types unit  ## ruff, mypy and pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -m 'not exhaustive' -n auto --dist loadfile

exhaustive: $(STAMP)  ## complete enumerations, minutes long
	$(BIN)/python -m pytest -m exhaustive

bench: $(STAMP)  ## time search steps
	$(BIN)/python -m benchmarks

clean:  ## remove the environment and build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
