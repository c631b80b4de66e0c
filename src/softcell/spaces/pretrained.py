"""Weights of earlier runs: a trained network as it was saved, or the weights that another network starts from.

`load_pretrained` reads a training run, or the result of `softcell export --to safetensors`. `load_initial` also reads
the supernet of a search (`softcell train --from`). Modules of a supernet and of a derived network have the same names,
so the network takes what its genotype uses. A supernet's BatchNorms may have no scales and shifts (DARTS,
Section 3); these start at 1 and 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.engine.checkpoint import CURRENT, PREVIOUS, load_latest
from softcell.engine.manifest import MAPPING, TEXT, TEXTS, TYPES, check_types
from softcell.engine.runfolder import MANIFEST, checksum
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
"""The fields of a `model.json`, as `softcell.engine.manifest` has them for the run it comes from."""


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
    if not file.exists():
        raise UserError(f"{folder} has no weights ({WEIGHTS}); restore the file from a backup, or repeat the run")
    if not file.is_file():
        raise UserError(f"{file} must be a regular file, but is not one")
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: these are not the weights of the network in this folder ({reason[:200]})") from error
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


MAX_NAMED = 6
"""At most this many tensors that do not fit are named in a message."""


def load_initial(network: nn.Module, folder: str | Path) -> dict[str, Any]:
    """Copies the weights and buffers of every layer whose names and shapes all fit from the run in `folder`.

    Whole layers only: a new classifier does not keep the biases of another. The classifier fits if the number of
    classes is the same. An auxiliary tower is not part of a trained network's file and starts from random weights.
    Returns the record for `run.json`: the run and its kind, its file's SHA-256, how many parameters fitted, and which
    tensors did not.
    """
    kind = _kind(folder)
    given, about, file = _supernet(folder) if kind == "search" else _trained(folder)
    own = network.state_dict()
    # A supernet without scales and shifts leaves those of the network at 1 and 0, where they start.
    free = _scales_and_shifts(network) if kind == "search" else set()
    unfit = {
        _layer(name)
        for name in own
        if (name not in given and name not in free) or (name in given and given[name].shape != own[name].shape)
    }
    fitting = {name: tensor for name, tensor in given.items() if name in own and _layer(name) not in unfit}
    starts = fitting.keys() | {name for name in free if _layer(name) not in unfit}
    left_out = [name for name in own if name not in starts and not name.startswith("auxiliary.")]
    learned = {name: parameter.numel() for name, parameter in network.named_parameters()}
    taken = sum(size for name, size in learned.items() if name in fitting)
    if not taken:
        raise UserError(
            f"no weight of {folder} fits this network: {_mismatch(own, given)}; start from a {kind} run of the same "
            f"architecture and size (that one is {about})"
        )
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    return {
        "run": str(Path(folder).resolve()),
        "kind": kind,
        "sha256": checksum(file),
        "parameters": taken,
        "of": sum(size for name, size in learned.items() if not name.startswith("auxiliary.")),
        "left_out": left_out,
    }


def describe_initial(found: Mapping[str, Any], holdout: float = 0.0) -> str:
    """One sentence on the weights that were copied, and a warning if they make held-out images less informative.

    holdout: the share of training images that are held out. A search learns from most of them.
    """
    what = "the supernet of " if found.get("kind") == "search" else ""
    text = f"starting from {what}{found['run']}: {found['parameters']:,} of {found['of']:,} parameters"
    left_out = found["left_out"]
    if left_out:
        more = f" and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
        text += f"; new, since they do not fit: {', '.join(left_out[:MAX_NAMED])}{more}"
    if what and holdout:
        text += "; the search may have learned from images that are held out now, so their accuracy is too high"
    return text


def _kind(folder: str | Path) -> str:
    """`search`, or `train` for everything else, which `read_description` checks."""
    if not (Path(folder) / MANIFEST).is_file():
        return "train"  # an export, or nothing
    return "search" if RunFolder.open(folder).manifest["kind"] == "search" else "train"


def _trained(folder: str | Path) -> tuple[Mapping[str, Tensor], str, Path]:
    """The weights of a finished training run or of an export, what it is, and its file."""
    description = read_description(folder)  # verifies the file, and that the run is a finished training run
    file = Path(folder) / WEIGHTS
    try:
        given = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    space = description["genotype"].get("space") if isinstance(description["genotype"], dict) else None
    return given, f"in space {space!r} with {description['space_settings']}", file


def _supernet(folder: str | Path) -> tuple[Mapping[str, Tensor], str, Path]:
    """The weights of a finished search's supernet, what it is, and the file of its latest checkpoint."""
    manifest, path = RunFolder.open(folder).manifest, Path(folder)
    if manifest["status"] != "finished":
        raise UserError(
            f"--from needs a finished run, but {folder} is a search with status {manifest['status']!r}; finish it with "
            f"`softcell search --resume {folder}`"
        )
    loaded = load_latest(path)
    if loaded is None:
        raise UserError(f"--from {folder} needs the checkpoint of the search, but only the best seed was kept")
    task = loaded.state.get("task")
    given = task.get("supernet") if isinstance(task, Mapping) else None
    if not isinstance(given, Mapping) or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        raise UserError(
            f"--from needs the weights of a supernet, but {manifest['recipe'].get('method')} trains architectures one "
            f"by one: {folder} has none"
        )
    recipe = manifest["recipe"]
    file = path / (CURRENT if loaded.note is None else PREVIOUS)
    return given, f"in space {recipe.get('space')!r} with {recipe.get('space_settings')}", file


def _scales_and_shifts(network: nn.Module) -> set[str]:
    """The names of the weights and biases of all BatchNorms."""
    norms = [name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)]
    return {f"{name}.{part}" for name in norms for part in ("weight", "bias")}


def _layer(name: str) -> str:
    """`stem.0.weight` belongs to the layer `stem.0`."""
    return name.rpartition(".")[0]


def _mismatch(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """The first tensor that does not fit, in words."""
    for name, tensor in own.items():
        if name in given and given[name].shape != tensor.shape:
            return f"{name} is {list(tensor.shape)} here and {list(given[name].shape)} there"
    return f"no tensor has the same name ({next(iter(own), 'none')} here, {next(iter(given), 'none')} there)"
