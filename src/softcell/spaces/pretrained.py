"""Trained networks from their folders: a training run, or the result of `softcell export --to safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.engine.manifest import MAPPING, TEXT, TEXTS, TYPES, check_types
from softcell.engine.runfolder import checksum
from softcell.errors import UserError
from softcell.files import Fields, read_json
from softcell.registry import load_plugins
from softcell.spaces.base import Inputs, Network, build_space
from softcell.text import clock, count_of
from softcell.trust import trusting

WEIGHTS = "model.safetensors"
MODEL = "model.json"
FORMAT = "softcell-model"
VERSION = 1
MODEL_TYPES = {
    "genotype": MAPPING,
    "space_settings": MAPPING,
    "plugins": TEXTS,
    "task": TEXT,
    "about": MAPPING,
    "checksums": MAPPING,
    **{name.removeprefix("results."): test for name, test in TYPES.items() if name.startswith("results.data")},
}
"""What a `model.json` says of a network, as `softcell.engine.manifest` has it for the run it comes from."""


def load_pretrained(folder: str | Path, *, trust: bool = False) -> Network:
    """The network in `folder` with its weights, on the CPU and in eval mode. trust: run plugins that it names."""
    description = read_description(folder)
    with trusting(trust):
        load_plugins(description["plugins"], f"the model in {folder}")
    genotype = Genotype.from_dict(description["genotype"], f"{folder}: genotype")
    space = build_space(genotype.space, description["space_settings"])
    channels, height, width = description["data"]["shape"]
    outputs = description["data"].get("outputs", len(description["data"]["classes"]))  # an embedding has its own number
    network = space.network(genotype, (channels, height, width), outputs)
    file = Path(folder) / WEIGHTS
    if file.exists() and not file.is_file():
        raise UserError(f"{file} must be a regular file, but is not one")
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: these are not the weights of the network beside them ({reason[:200]})") from error
    data = description["data"]
    scaled_to = tuple(data["scaled_to"]) if "scaled_to" in data else None  # runs of earlier versions have none
    network.inputs = Inputs(
        tuple(data["classes"]), tuple(data["mean"]), tuple(data["std"]), scaled_to, data.get("whole", False)
    )
    return network.eval()


def read_description(folder: str | Path) -> dict[str, Any]:
    """The description of a network without its weights: genotype, space settings, plugins, data, and facts about it."""
    path = Path(folder)
    if (path / MODEL).is_file():
        return _exported(path / MODEL)
    run = RunFolder.open(path)
    manifest = run.manifest
    if manifest["kind"] != "train" or manifest["status"] != "finished":
        raise UserError(
            f"{folder} must be a finished training run, but it is a {manifest['kind']} run with status "
            f"{manifest['status']!r}; make one with `softcell train`"
        )
    run.verify("genotype.json", WEIGHTS)
    results, recipe = manifest["results"], manifest["recipe"]
    about = {"data": results["data"]["source"], "parameters": f"{results['parameters']:,}"}
    about["multiply-adds"] = f"{results['multiply_adds']:,}"
    if results.get("accuracy") is not None:
        about["accuracy"] = f"{results['accuracy']:.2%} on the {results['split']} split ({results['count']:,} images)"
    if results.get("recall_at_1") is not None:
        about["recall at 1"] = f"{results['recall_at_1']:.2%} among {results['count']:,} images of {results['split']}"
    length = count_of(recipe["epochs"], "epoch") if recipe["epochs"] else clock(recipe.get("time") or 0.0)
    about["training"] = f"{length}, recipe {recipe['recipe']}, seed {manifest['seed']}"
    return {
        "genotype": Genotype.load(path).to_dict(),
        "space_settings": recipe["space_settings"],
        "plugins": list(recipe.get("plugins", ())),
        "data": {**results["data"], "classes": _learnt(results["data"]["classes"], recipe)},
        "task": recipe.get("task", "classify"),
        "about": about,
    }


def _learnt(classes: list[str], recipe: Mapping[str, Any]) -> list[str]:
    """The classes of the training images: for a retrieval the first half."""
    return classes[: len(classes) // 2] if recipe.get("task") == "retrieve" else classes


def _exported(file: Path) -> dict[str, Any]:
    data = read_json(file)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{file}: a described model must say format={FORMAT!r}")
    if type(data.get("version")) is not int or not 1 <= data["version"] <= VERSION:
        raise UserError(f"{file}: version must be a whole number up to {VERSION}, got {data.get('version')!r}")
    for key in ("genotype", "space_settings", "data", "plugins"):
        if key not in data:
            raise UserError(f"{file}: `{key}` is missing; export the model again")
    check_types(data, str(file), MODEL_TYPES)
    known = data.get("checksums", {})  # exports of earlier versions have none
    weights = file.with_name(WEIGHTS)
    if isinstance(known, dict) and WEIGHTS in known and weights.is_file() and checksum(weights) != known[WEIGHTS]:
        raise UserError(
            f"{weights} is not what was exported with {file.name}: its SHA-256 differs from the one there; export the "
            "model again"
        )
    return Fields.of(data, str(file))
