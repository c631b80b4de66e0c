"""Weights of an earlier training as the start of another: for small datasets, such as photographs of birds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from softcell.engine.runfolder import checksum
from softcell.errors import UserError
from softcell.spaces.pretrained import WEIGHTS, read_description

NAMED = 6
"""Of the tensors that are not taken over so many are named in a message."""


def load_initial(network: nn.Module, folder: str | Path) -> dict[str, Any]:
    """Copies the weights and buffers of every layer whose names and shapes all fit from the network in `folder`.

    Whole layers: a new classifier does not keep the biases of another. It fits where the number of classes is the same.
    An auxiliary tower is not part of a trained network's file and starts from random weights. Gives what is recorded of
    it in `run.json`: the run, its file's SHA-256, how much fitted and what did not.
    """
    description = read_description(folder)  # verifies the file, and that the run is a finished training
    file = Path(folder) / WEIGHTS
    try:
        given = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    own = network.state_dict()
    unfit = {_layer(name) for name in own if name not in given or given[name].shape != own[name].shape}
    fitting = {name: tensor for name, tensor in given.items() if name in own and _layer(name) not in unfit}
    left_out = [name for name in own if name not in fitting and not name.startswith("auxiliary.")]
    learned = {name: parameter.numel() for name, parameter in network.named_parameters()}
    taken = sum(size for name, size in learned.items() if name in fitting)
    if not taken:
        other = description["genotype"].get("space") if isinstance(description["genotype"], dict) else None
        raise UserError(
            f"no weight of {folder} fits this network: {_mismatch(own, given)}; start from a training of the same "
            f"architecture and size (that one is in space {other!r} with {description['space_settings']})"
        )
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    return {
        "run": str(Path(folder).resolve()),
        "sha256": checksum(file),
        "parameters": taken,
        "of": sum(size for name, size in learned.items() if not name.startswith("auxiliary.")),
        "left_out": left_out,
    }


def describe_initial(found: dict[str, Any]) -> str:
    """One sentence on what was taken over."""
    text = f"starting from {found['run']}: {found['parameters']:,} of {found['of']:,} parameters"
    left_out = found["left_out"]
    if not left_out:
        return text
    more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
    return f"{text}; new, since they do not fit: {', '.join(left_out[:NAMED])}{more}"


def _layer(name: str) -> str:
    """`stem.0.weight` belongs to the layer `stem.0`."""
    return name.rpartition(".")[0]


def _mismatch(own: dict[str, Any], given: dict[str, Any]) -> str:
    """The first tensor that does not fit, in words."""
    for name, tensor in own.items():
        if name in given and given[name].shape != tensor.shape:
            return f"{name} is {list(tensor.shape)} here and {list(given[name].shape)} there"
    return f"no tensor has the same name ({next(iter(own), 'none')} here, {next(iter(given), 'none')} there)"
