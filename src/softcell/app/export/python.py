"""A network as one Python file that needs torch and its weights, nothing else."""

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
from softcell.app.export._tree import WIDTH, Expression, Functions, Tree
from softcell.app.export.model import BATCHES, Model, check_equal, sample_pixels
from softcell.errors import UserError

WEIGHTS = "model.safetensors"

HEADER = '''"""A network of cells; ABOUT has the facts about it.

    from {module} import load, normalise

    network = load()                        # reads {weights} beside this file
    {output} = network(normalise(pixels)){pad}  # pixels: float [n, {channels}, {height}, {width}] in 0..1

Made by `softcell export`. It needs torch alone, and holds the network as it is used, without its training.
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
    network = make_network()
    network.load_state_dict(tensors)
    return network.eval()


def read_image(file: str | Path) -> Tensor:
    """An image file as pixels [1, c, h, w] in 0..1; this alone needs Pillow and numpy."""
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
    """Prints the most likely classes of every image file that can be read; 2 where some cannot."""
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
    """Prints the other image files, the most similar to the first one first; 2 where some could not be read."""
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
    except BrokenPipeError:  # the reader, such as `head`, has gone
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


def to_python(model: Model, module: str = "model") -> str:
    """The text of the file; `module` is the name it will be imported by."""
    if not module.isidentifier():
        raise UserError(f"a module's name must be a plain identifier, got {module!r}")
    units = Units(model.network)
    roots: list[Key] = list(units.copied)
    while True:  # plain values in the tree name classes of their own, whose code may read more of the tree
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
    pad = " " * max(0, 9 - len(model.output))
    header = HEADER.format(
        module=module, weights=WEIGHTS, channels=channels, height=height, width=width, output=model.output, pad=pad
    )
    code = [PART + (HAVING if "having(" in functions else ""), *(f"{text}\n" for text in sources.ordered())]
    code += [*(f"{text}\n" for text in classes), functions + "\n"]
    code.append(
        FOOTER.replace("    image = SCALED\n", _scaled(model)).replace("KINDS", _kinds(model))
        + (CLASSIFY if model.output == "logits" else RETRIEVE)
        + END
    )
    body = "\n\n".join(code)
    text = "\n\n".join((header, _imports(sources, body), _constants(model) + "\n\n\n" + body))
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n") + "\n"


def _imports(sources: Sources, body: str) -> str:
    lines = {f"import {name}" for name in ("argparse", "json", "math", "os", "sys")} | {"from pathlib import Path"}
    lines |= {"import torch", "from torch import Tensor", "from torch import nn"} | sources.imports
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
    return "\n".join(["from __future__ import annotations", "", *own, "", *torch_])


def _constants(model: Model) -> str:
    """Facts about the model as literals.

    Whatever comes from a file, names of keys included, enters the source by `repr` of plain values and in no other way:
    neither a docstring nor a comment holds any of it.
    """
    about = {"space": model.network.genotype.space, **(model.about or {"weights": "not trained"})}
    facts = "\n".join(f"    {str(name)!r}: {str(value)!r}," for name, value in about.items())
    shape = tuple(int(size) for size in model.shape)
    mean, std = (tuple(float(value) for value in values) for values in (model.mean, model.std))
    comment = "# that the embedding was learnt from\n" if model.output == "embedding" else ""
    names = repr(tuple(str(name) for name in model.classes))
    classes = names if len(names) < WIDTH - 10 else _filled([repr(str(name)) for name in model.classes])
    return (
        f"ABOUT = {{\n{facts}\n}}\n"
        f"SHAPE = {shape!r}  # of an image: channels, height, width\n"
        f"MEAN, STD = {mean!r}, {std!r}\n{comment}CLASSES = {classes}"
    )


def _filled(items: list[str]) -> str:
    """A tuple over several lines, as many items in each as fit."""
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) > WIDTH - 6:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    return "(\n" + "".join(f"    {line}\n" for line in lines) + ")"


def _kinds(model: Model) -> str:
    """The types of the network's tensors, by their names in its weights file."""
    used = dict.fromkeys(tensor.dtype for tensor in model.network.state_dict().values())
    return "{" + ", ".join(f'"{KINDS[kind]}": {kind}' for kind in used) + "}"


def _class(name: str, about: str, lines: Sequence[str]) -> str:
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
    first, *rest = expression.lines()
    return "\n".join([f"def {name}({', '.join(arguments)}):", f"    return {first}", *(f"    {line}" for line in rest)])


def check_python(file: Path, model: Model) -> float:
    """Runs the file with its weights and returns the largest relative difference from the network."""
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
