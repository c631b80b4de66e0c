"""A network as Python: `model.py` holds only the network, `predict.py` loads its weights and reads images."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from softcell.app.export._source import Key, Sources
from softcell.app.export._trace import Units
from softcell.app.export._tree import WIDTH, Expression, Functions, Tree, filled
from softcell.app.export.model import BATCHES, Model, check_equal, sample_pixels

HEADER = '''"""A network of cells: its modules and their connections, without weights and training code.

`make_network()` maps images [n, {channels}, {height}, {width}] to {output} [n, {features}]. `predict.py` in the same
folder loads its weights and normalises images. Made by `softcell export`; needs only torch.
"""'''

USE = '''"""The trained network of `model.py`: loads its weights, normalises pixels and reads images.

    from predict import load, normalise

    network = load()                        # reads model.py and model.safetensors in this folder
    {output} = network(normalise(pixels)){pad}  # pixels: float [n, {channels}, {height}, {width}] in 0..1

`python predict.py {files}` prints {printed}; ABOUT has facts about the network.
Made by `softcell export`. It needs only torch, and Pillow and numpy for image files.
"""'''

PART = '''class Part(nn.Module):
    """A module that is given its parts by name: modules, parameters, buffers and plain values."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
'''
HAVING = '''

def having(module, **parts):
    """The module with further attributes."""
    for name, part in parts.items():
        setattr(module, name, part)
    return module
'''

IMPORTS = """from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
""".rstrip()

FOOTER = '''def normalise(pixels: Tensor) -> Tensor:
    """pixels [n, c, h, w] in 0..1 normalised as in training."""
    mean, std = (torch.tensor(values, device=pixels.device).view(1, -1, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


def load(weights: str | Path = Path(__file__).with_name("model.safetensors")) -> nn.Module:
    """The trained network in eval mode; its file has eight bytes for the length of a JSON header, this, and numbers."""
    data, kinds, tensors = bytearray(Path(weights).read_bytes()), KINDS, {}
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(data[begin:end] or bytearray(8), dtype=kinds[entry["dtype"]])
            tensors[name] = flat[: math.prod(entry["shape"])].reshape(entry["shape"])
    # By its path: the name `model` may belong to another module of the process.
    spec = importlib.util.spec_from_file_location("model", Path(__file__).with_name("model.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network = module.make_network()
    network.load_state_dict(tensors)
    return network.eval()


def read_image(file: str | Path) -> Tensor:
    """An image file as pixels [1, c, h, w] in 0..1; only this needs Pillow and numpy."""
    import numpy
    from PIL import Image, ImageOps

    channels, height, width = SHAPE
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray(((numpy.asarray(image).astype("int64") * 255 + 32767) // 65535).astype("uint8"))
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):  # over white
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("L" if channels == 1 else "RGB")
    image = SCALED
    return torch.from_numpy(numpy.array(image)).reshape(1, height, width, channels).permute(0, 3, 1, 2) / 255
'''
CLASSIFY = '''

def main() -> int:
    """Prints the most likely classes of every image file that can be read; returns 2 if some cannot."""
    parser = argparse.ArgumentParser(description="Name the most likely classes of images.")
    parser.add_argument("files", nargs="+", metavar="IMAGE", help="a picture")
    files, code, network = parser.parse_args().files, 0, load()
    for file in files:
        try:
            pixels = read_image(file)
        except ImportError:
            raise  # Pillow or numpy is missing
        except Exception as error:  # damaged files raise nearly everything
            print(f"{file} cannot be read as an image: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            code = 2
            continue
        with torch.no_grad():
            best = network(normalise(pixels)).softmax(1)[0].topk(min(3, len(CLASSES)))
        if len(files) > 1:
            print(file)
        for share, number in zip(best.values.tolist(), best.indices.tolist()):
            print(f"{share:6.1%}  {CLASSES[number]}")
    return code
'''
RETRIEVE = '''

def read_images(files):
    """The image files that can be read, each with its pixels; the others are named on standard error."""
    for file in files:
        try:
            yield file, read_image(file)
        except ImportError:
            raise  # Pillow or numpy is missing
        except Exception as error:  # damaged files raise nearly everything
            print(f"{file} cannot be read as an image: {getattr(error, 'strerror', None) or error}", file=sys.stderr)


def embed(pixels: Tensor, network: nn.Module) -> Tensor:
    """Images [n, c, h, w] in 0..1 to embeddings of length 1, [n, d]: the product of two of them is their similarity."""
    with torch.no_grad():
        return nn.functional.normalize(network(normalise(pixels)))


def main() -> int:
    """Prints the other image files, most similar to the first one first; returns 2 if some could not be read."""
    parser = argparse.ArgumentParser(description="Sort images by their similarity to a query.")
    parser.add_argument("query", metavar="QUERY", help="the picture to compare with")
    parser.add_argument("others", nargs="+", metavar="IMAGE", help="a picture to compare")
    given, network = parser.parse_args(), load()
    found = [(file, embed(pixels, network)[0]) for file, pixels in read_images([given.query])]
    if not found:
        return 2
    (_, query), others = found[0], [(embed(x, network)[0], file) for file, x in read_images(given.others)]
    for likeness, file in sorted(((float(query @ other), file) for other, file in others), reverse=True):
        print(f"{likeness:6.3f}  {file}")
    return 0 if len(others) == len(given.others) else 2
'''
END = """

if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os._exit(0)
    sys.exit(code)
"""
KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in a safetensors file."""


def to_python(model: Model) -> str:
    """The text of `model.py`: the network and nothing else."""
    units = Units(model.network)
    roots: list[Key] = list(units.copied)
    while True:  # plain values in the tree name further classes, whose code may read more of the tree
        sources = Sources(roots)
        tree = Tree(sources, units)
        expression = tree.module(model.network)
        missing = [key for key in tree.needs if key not in sources.pieces]
        if not missing:
            break
        roots = [*roots, *missing]
    made, rest = Functions(expression).write()
    functions = "\n\n\n".join(_function(*one) for one in [*made, ("make_network", [], rest)])
    whole = units.traced.get(id(model.network))
    classes = [
        _class(name, "The whole network." if whole is not None and lines == whole.lines else about, lines)
        for lines, (name, about) in tree.classes.items()
    ]
    channels, height, width = map(int, model.shape)
    features = len(model.classes) if model.output == "logits" else "d"
    header = HEADER.format(channels=channels, height=height, width=width, output=model.output, features=features)
    code = [PART + (HAVING if "having(" in functions else ""), *(f"{text}\n" for text in sources.ordered())]
    body = "\n\n".join([*code, *(f"{text}\n" for text in classes), functions])
    return _stripped("\n\n".join((header, _imports(sources, body) + "\n\n\n" + body)))


def to_predict(model: Model) -> str:
    """The text of `predict.py`, which uses the network of `model.py` in the same folder."""
    channels, height, width = map(int, model.shape)
    classified = model.output == "logits"
    header = USE.format(
        channels=channels,
        height=height,
        width=width,
        output=model.output,
        pad=" " * max(0, 9 - len(model.output)),
        files="IMAGE ..." if classified else "QUERY IMAGE ...",
        printed="the most likely classes" if classified else "the images, most similar to QUERY first",
    )
    body = FOOTER.replace("    image = SCALED\n", _scaled(model)).replace("KINDS", _kinds(model))
    body += (CLASSIFY if classified else RETRIEVE) + END
    return _stripped("\n\n".join((header, IMPORTS, _constants(model) + "\n\n\n" + body)))


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n") + "\n"


def _imports(sources: Sources, body: str) -> str:
    lines = {"from torch import nn"} | sources.imports
    lines |= {"import torch"} if re.search(r"\btorch\.", body) else set()
    lines |= {"from torch import Tensor"} if re.search(r"\bTensor\b", body) else set()
    if re.search(r"\bF\.", body) and not any(line.endswith(" as F") for line in lines):
        lines.add("import torch.nn.functional as F")
    grouped: dict[str, set[str]] = {}
    plain = set()
    for line in lines:
        words = line.split(" import ")
        if line.startswith("from ") and " as " not in line:
            grouped.setdefault(words[0][5:], set()).add(words[1])
        else:
            plain.add(line)
    plain |= {f"from {origin} import {', '.join(sorted(names))}" for origin, names in grouped.items()}
    own = sorted((line for line in plain if "torch" not in line), key=lambda line: (line.startswith("from"), line))
    torch_ = sorted((line for line in plain if "torch" in line), key=lambda line: (line.startswith("from"), line))
    return "\n".join(["from __future__ import annotations", "", *own, *([""] if own else []), *torch_])


def _constants(model: Model) -> str:
    """Facts about the model as literals.

    Whatever comes from a file, names of keys included, enters the source by `repr` of plain values and in no other way:
    neither a docstring nor a comment holds any of it.
    """
    about = {"space": model.network.genotype.space, **(model.about or {"weights": "not trained"})}
    facts = "\n".join(f"    {str(name)!r}: {str(value)!r}," for name, value in about.items())
    shape = tuple(int(size) for size in model.shape)
    mean, std = (tuple(float(value) for value in values) for values in (model.mean, model.std))
    comment = "# that the embedding was learned from\n" if model.output == "embedding" else ""
    names = repr(tuple(str(name) for name in model.classes))
    if len(names) >= WIDTH - 10:
        names = "\n".join(["(", *filled([repr(str(name)) for name in model.classes]), ")"])
    return (
        f"ABOUT = {{\n{facts}\n}}\n"
        f"SHAPE = {shape!r}  # of an image: channels, height, width\n"
        f"MEAN, STD = {mean!r}, {std!r}\n{comment}CLASSES = {names}"
    )


def _kinds(model: Model) -> str:
    """The types of the network's tensors, by their names in its weights file."""
    used = dict.fromkeys(tensor.dtype for tensor in model.network.state_dict().values())
    return "{" + ", ".join(f'"{KINDS[kind]}": {kind}' for kind in used) + "}"


def _class(name: str, about: str, lines: Sequence[str]) -> str:
    # The sentence is written as it is, so it must need no escapes; one that is too long is left out.
    text = f'    """{about}"""\n\n' if about and '"' not in about and "\\" not in about and len(about) < WIDTH else ""
    return f"class {name}(Part):\n{text}" + "\n".join(f"    {line}" for line in lines)


def _scaled(model: Model) -> str:
    """The lines that resize a picture as in training: scaled, then the centre cropped."""
    (_, height, width), (rows, columns) = model.shape, model.scaled_to or model.shape[1:]
    how = "image.resize(" if model.whole else "ImageOps.fit(image, "
    lines = [f"image = {how}({columns}, {rows}), Image.Resampling.BILINEAR)"]
    if (rows, columns) != (height, width):
        lines.append(f"left, top = {(columns - width) // 2}, {(rows - height) // 2}  # only the centre is used")
        lines.append("image = image.crop((left, top, left + width, top + height))")
    return "".join(f"    {line}\n" for line in lines)


def _function(name: str, arguments: Sequence[str], expression: Expression) -> str:
    first, *rest = expression.lines(WIDTH - 4, "return ")
    return "\n".join([f"def {name}({', '.join(arguments)}):", f"    return {first}", *(f"    {line}" for line in rest)])


def check_python(file: Path, model: Model) -> float:
    """The largest relative difference between `predict.py`, with the files next to it, and the network."""
    loaded = import_file(file)
    network: nn.Module = loaded.load()
    worst = 0.0
    with torch.no_grad():
        for batch in BATCHES:
            pixels = sample_pixels(model.shape, batch)
            found = network(loaded.normalise(pixels))
            worst = max(worst, check_equal(file.name, model.normalised()(pixels), found))
    return worst


def import_file(file: Path) -> ModuleType:
    """A Python file as a module, without an entry in `sys.modules`."""
    spec = importlib.util.spec_from_file_location("softcell_exported", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
