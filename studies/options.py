"""Command-line options shared by the studies. Each study names the ones it uses and sets its defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def minutes(text: str) -> float:
    """The value of --minutes; 0 only writes the record and runs nothing."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")
    return found


_OPTIONS: dict[str, dict[str, Any]] = {
    "data": {"default": "cifar10", "help": "dataset"},
    "data_root": {"help": "folder of named datasets"},
    "epochs": {"type": int, "help": "epochs of each search; the recipe's by default"},
    "seeds": {"type": int, "default": 1, "help": "searches per arm; one is not a result"},
    "batch_size": {"type": int, "help": "batch size of each search; the recipe's by default"},
    "scale": {"help": "small or paper; by default the one that fits the data"},
    "device": {"default": "auto", "help": "auto, cpu or cuda"},
    "precision": {"help": "auto, float32 or bfloat16"},
    "engine": {"help": "auto, eager or graph: how steps are run"},
    "set": {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "settings of all searches"},
    "at_once": {"type": int, "help": "runs that share the device; all of them on a GPU, one elsewhere"},
    "minutes": {"type": minutes, "help": "stop after this time (0: immediately); the same command resumes"},
    "runs": {"type": Path, "help": "folder of the runs"},
    "out": {"type": Path, "help": "folder of the record and the drawings"},
}
_ALWAYS = ("data", "data_root", "device", "minutes", "runs", "out")
_OF_RECIPES = ("data", "data_root", "scale", "epochs", "batch_size", "device", "precision", "engine")


def study_parser(
    module: str, doc: str | None, *names: str, one_file: bool = False, **defaults: Any
) -> argparse.ArgumentParser:
    """A parser with the options that every study has and those of `names`.

    Args:
        doc: the module's docstring; its first line describes the study.
        one_file: --out is the file of the record, not a folder.
        defaults: defaults that differ from the shared ones; an option that has one need not be named.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").splitlines()[0])
    for name, option in _OPTIONS.items():
        if name in (*_ALWAYS, *names, *defaults):
            own = {"default": defaults[name]} if name in defaults else {}
            if name == "out" and one_file:
                own["help"] = "JSON file of the record; drawings are written next to it"
            parser.add_argument(f"--{name.replace('_', '-')}", **{**option, **own})
    return parser


def recipe_settings(options: argparse.Namespace, names: Sequence[str] = _OF_RECIPES) -> dict[str, Any]:
    """The settings of a recipe that were given on the command line."""
    given = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}
