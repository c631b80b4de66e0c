"""Frozen teachers from a run, a file of weights, an exported program, or a module that a plugin registers.

A teacher maps images to feature maps. It is in eval mode, needs no gradients, and reads images normalised by the
mean and deviation of the data.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.files import parse_json
from softcell.nn.classifiers import ARCHITECTURES, Classifier, Tapped, get_architecture
from softcell.registry import load_plugins
from softcell.settings import build
from softcell.spaces.pretrained import WEIGHTS, load_pretrained
from softcell.trust import trusted, trusting

FORMAT = "softcell-classifier"
WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt")
WITHIN = ("state_dict", "model_state_dict", "model", "net", "network")
"""Where training scripts put the weights in a checkpoint that holds more."""
_REGISTERED: dict[str, Tapped] = {}


@dataclass(frozen=True, slots=True)
class FoundTeacher:
    """A teacher and what is known about it: its origin, a digest of its weights, its accuracy where measured."""

    module: Tapped
    about: dict[str, Any]


def register_teacher(name: str, module: nn.Module, layers: Sequence[str] = ()) -> None:
    """Makes any module usable as `--guide NAME`; from Python before a search, or in a plugin file.

    layers: names of submodules whose outputs are compared; without them the module returns feature maps from a method
    `features` or as its output.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from softcell.api import register_teacher, search
        >>> pools = nn.AvgPool2d(2), nn.AvgPool2d(2)
        >>> network = nn.Sequential(nn.Conv2d(1, 4, 1), pools[0], nn.Conv2d(4, 4, 1), pools[1], nn.Conv2d(4, 4, 1))
        >>> register_teacher("example", network, layers=["0", "2", "4"])
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> guide = {"teacher": "example"}
        >>> result = search("darts", space="nb201", epochs=1, space_settings=sizes, guide=guide, batch_size=512)
        >>> result.metrics[0]["guide_loss"] > 0
        True
    """
    if not name.isidentifier():
        raise UserError(f"a teacher's name must be a plain identifier, got {name!r}")
    _REGISTERED[name] = Tapped(module, layers)


def find_teacher(
    source: str, *, classifier: str | None = None, layers: Sequence[str] = (), trust: bool = False
) -> FoundTeacher:
    """The teacher that `source` names; `classifier` says what a file's weights belong to, built in or registered.

    trust: read a .pt2 program, which may run code, even if it was not trusted here before.
    """
    path, about = Path(source), dict[str, Any]()
    is_weights = path.name.lower().endswith(WEIGHT_FILES) and path.is_file()
    if classifier is not None and not is_weights and (source in _REGISTERED or path.exists()):
        raise UserError(
            f"guide.classifier names the network of a file of weights, but {source!r} is not one by its ending "
            f"({', '.join(WEIGHT_FILES)}); leave out guide.classifier, or rename the file if it is one"
        )
    if source in _REGISTERED:
        known = _REGISTERED[source]
        module = Tapped(known.module, layers) if layers else known
        return FoundTeacher(module, {"teacher": source, "digest": _digest(module)})
    if is_weights and classifier in _REGISTERED:
        known = _REGISTERED[classifier]
        # A copy: the registered module keeps its own weights.
        found = _filled(copy.deepcopy(known.module), _read(path)[0], path, classifier)
        layers = layers or known.layers
    elif is_weights:
        found = load_classifier(path, classifier)
    elif path.is_dir():
        found, about = _from_run(path)
    elif path.suffix.lower() == ".pt2" and path.is_file():
        with trusting(trust):
            program, about = read_program(path, "--guide")
        found = _Program(program)
    else:
        hint = f"; registered: {', '.join(_REGISTERED)}" if _REGISTERED else ""
        if source in ARCHITECTURES:
            hint += f"; {source} is built in, but not trained: first `softcell teacher {source} --data ... --out DIR`"
        raise UserError(
            f"no teacher at {source!r}: pass a run of `softcell teacher` or `softcell train`, a file of weights "
            f"({', '.join(WEIGHT_FILES)}), a .pt2 program, or a name that a plugin registered{hint}"
        )
    tapped = Tapped(found, layers)
    return FoundTeacher(tapped, {"teacher": str(path), "digest": _digest(tapped), **about})


def classifier_metadata(name: str, settings: Mapping[str, Any], in_channels: int, num_classes: int) -> dict[str, str]:
    """Metadata of a weights file, from which its network can be rebuilt."""
    sizes = {"in_channels": in_channels, "num_classes": num_classes}
    texts = {key: str(value) for key, value in sizes.items()}
    return {"format": FORMAT, "classifier": name, "settings": json.dumps(dict(settings)), **texts}


def _from_run(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    run = RunFolder.open(folder)
    run.verify(WEIGHTS)
    manifest = run.manifest
    results = manifest["results"]
    if manifest["status"] != "finished":
        raise UserError(f"a teacher must be fully trained, but {folder} is {manifest['status']!r}; resume it")
    about = {"accuracy": results.get("accuracy"), "split": results.get("split")}
    if manifest["kind"] == "teacher":
        # The network may have a candidate of theirs.
        load_plugins(manifest["recipe"].get("plugins", ()), f"the teacher in {folder}")
        return load_classifier(folder / WEIGHTS), about
    if manifest["kind"] == "train":
        return load_pretrained(folder), about
    raise UserError(f"a teacher is a trained network, but {folder} is a `softcell {manifest['kind']}` run")


def load_classifier(file: Path, classifier: str | None = None) -> Classifier:
    """A built-in classifier with the weights in `file`, on the CPU and in eval mode."""
    state, metadata = _read(file)
    name = classifier or metadata.get("classifier")
    if name is None:
        raise UserError(
            f"{file} does not say which network its weights belong to; name it with --set guide.classifier=resnet18, "
            "or by the name of a module that a plugin registered (`register_teacher`)"
        )
    settings = metadata.get("settings", "{}") if metadata.get("classifier") == name else "{}"
    architecture = get_architecture(name)
    stem, last = state.get("stem.0.weight"), state.get("classifier.weight")
    if stem is None or last is None or stem.dim() != 4:
        raise UserError(f"{file}: these are not the weights of a built-in {name!r}")
    try:
        given = parse_json(settings, "settings")
        if not isinstance(given, dict):
            raise UserError("settings are not a mapping")
    except UserError as error:
        raise UserError(f"{file}: its metadata are damaged (settings {settings[:80]!r})") from error
    network = build(architecture, given, f"classifier {name}").build(stem.shape[1], last.shape[0])
    _filled(network, state, file, name)
    return network


def _filled(network: nn.Module, state: Mapping[str, Tensor], file: Path, name: str) -> nn.Module:
    """The network with these weights, in eval mode."""
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: these are not the weights of {name!r} ({reason[:200]})") from error
    return network.eval()


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights by name, and what the file says about them."""
    if file.suffix.lower() == ".safetensors":
        try:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
            return load_file(file), metadata
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file, at which the unpickler may raise anything
        raise UserError(
            f"{file}: cannot be read as weights alone, and nothing else is read from it, since that could run code; "
            "save the `state_dict()` of the network"
        ) from error
    for key in WITHIN:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    named = isinstance(loaded, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items())
    if not named:
        raise UserError(
            f"{file}: a file of weights is a `state_dict()`, which maps names to tensors, or a checkpoint with one "
            f"under {', '.join(WITHIN)}; this file has none"
        )
    prefix = "module." if all(name.startswith("module.") for name in loaded) else ""  # of DataParallel
    return {name.removeprefix(prefix): value for name, value in loaded.items()}, {}


def read_program(file: Path, asked_by: str) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """An exported program and its digest; reading one unpickles objects, so the file must be trusted."""
    content = trusted(file, asked_by, "program")
    log = logging.getLogger("torch.export")  # it would print a traceback next to our message
    was, log.disabled = log.disabled, True
    try:
        program = torch.export.load(io.BytesIO(content.data))  # the bytes that were checked, not the file as it is now
    except Exception as error:  # a foreign file: no archive, another version's, code that fails
        reason = " ".join(str(error).split())
        raise UserError(
            f"{file}: cannot be read as an exported program ({reason[:200]}); write it with `torch.export.save`"
        ) from error
    finally:
        log.disabled = was
    return program, {"digest": content.digest}


class _Program(nn.Module):
    """An exported program that can be moved to a device."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self._program = [program]
        self._runs: dict[torch.device, Any] = {}

    def forward(self, x: torch.Tensor) -> Any:
        if x.device not in self._runs:
            moved = move_to_device_pass(self._program[0], x.device)
            self._runs[x.device] = moved.module()
        return self._runs[x.device](x)


def _digest(module: nn.Module) -> str:
    """SHA-256 over all weights and statistics by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
