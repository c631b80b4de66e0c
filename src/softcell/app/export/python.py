"""A network as one Python file that needs torch and its weights, nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from softcell.app.export.model import BATCHES, Model, check_equal, sample_pixels
from softcell.app.export.source import Key, Sources
from softcell.app.export.tree import Expression, Tree, classes_of, named_parts
from softcell.errors import UserError

WEIGHTS = "model.safetensors"

HEADER = '''"""A network found by architecture search; ABOUT says what is known of it.

    from {module} import load, normalise

    network = load()                        # reads {weights} beside this file
    {output} = network(normalise(pixels)){pad}  # pixels: float [n, {channels}, {height}, {width}] in 0..1

Made by `softcell export`. It needs torch alone; what a training needs beside it (dropped paths, auxiliary
tower) is left out.
"""'''

PART = '''
class Part(nn.Module):
    """A module that is given its parts by name: modules, parameters, buffers and plain values."""

    def __init__(self, **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
'''
HAVING = '''

def having(module: nn.Module, **parts: object) -> nn.Module:
    """The module with further attributes."""
    for name, part in parts.items():
        setattr(module, name, part)
    return module
'''

FOOTER = '''
def normalise(pixels: Tensor) -> Tensor:
    """pixels [n, c, h, w] in 0..1 to what the network was trained on."""
    mean, std = (torch.tensor(values, device=pixels.device).view(1, -1, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: eight bytes that give the length of a JSON header, the header, the numbers."""
    data = bytearray(Path(path).read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    kinds |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            part = data[8 + length + begin : 8 + length + end]
            kind = kinds[entry["dtype"]]
            flat = torch.frombuffer(part, dtype=kind) if part else torch.empty(0, dtype=kind)
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def load(weights: str | Path = Path(__file__).with_name("model.safetensors")) -> nn.Module:
    """The trained network in eval mode."""
    network = make_network()
    network.load_state_dict(read_safetensors(weights))
    return network.eval()


def read_image(file: str | Path) -> Tensor:
    """An image file as pixels [1, c, h, w] in 0..1; this alone needs Pillow and numpy."""
    import numpy
    from PIL import Image, ImageOps

    channels, height, width = SHAPE
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray(((numpy.asarray(image).astype("int64") * 255 + 32767) // 65535).astype("uint8"))
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):  # laid over white
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    image = SCALED
    return torch.from_numpy(numpy.array(image)).reshape(1, height, width, channels).permute(0, 3, 1, 2) / 255


def read_images(files: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The image files that can be read, each with its pixels; the others are named on standard error."""
    for file in files:
        try:
            pixels = read_image(file)
        except ImportError:
            raise  # Pillow or numpy is missing, for which no file is to blame
        except Exception as error:  # damaged files raise nearly everything
            reason = getattr(error, "strerror", None) or error
            print(f"{file} cannot be read as an image: {reason}", file=sys.stderr)
        else:
            yield file, pixels
'''
CLASSIFY = '''

def predict(pixels: Tensor, network: nn.Module) -> list[tuple[float, str]]:
    """The three most likely classes of one image, pixels [1, c, h, w] in 0..1, the most likely first: (share, name)."""
    with torch.no_grad():
        best = network(normalise(pixels)).softmax(1)[0].topk(min(3, len(CLASSES)))
    return [(share, CLASSES[number]) for share, number in zip(best.values.tolist(), best.indices.tolist())]


def main() -> int:
    """Prints the classes of every image file that can be read; 2 where some could not."""
    parser = argparse.ArgumentParser(description="Name the most likely classes of images.")
    parser.add_argument("files", nargs="+", metavar="IMAGE", help="a picture")
    files, count, network = parser.parse_args().files, 0, load()
    for count, (file, pixels) in enumerate(read_images(files), 1):
        if len(files) > 1:
            print(file)
        for share, name in predict(pixels, network):
            print(f"{share:6.1%}  {name}")
    return 0 if count == len(files) else 2
'''
RETRIEVE = '''

def embed(pixels: Tensor, network: nn.Module) -> Tensor:
    """Images [n, c, h, w] in 0..1 to embeddings of length 1, [n, d]: the product of two of them is their similarity."""
    with torch.no_grad():
        return F.normalize(network(normalise(pixels)))


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
    except BrokenPipeError:
        # The reader, such as `head`, has gone; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
"""


def to_python(model: Model, module: str = "model") -> str:
    """The text of the file; `module` is the name it will be imported by."""
    if not module.isidentifier():
        raise UserError(f"a module's name must be a plain identifier, got {module!r}")
    network = model.network
    roots: list[Key] = classes_of(network)
    while True:  # plain values in the tree name classes of their own, whose code may read more of the tree
        sources = Sources(roots)
        tree = Tree(sources)
        expression = tree.module(network)
        missing = [key for key in tree.needs if key not in sources.pieces]
        if not missing:
            break
        roots = [*roots, *missing]
    made, rest = named_parts(expression)
    functions = "\n\n\n".join(_function(name, part) for name, part in [*made, ("make_network", rest)])
    definitions = "\n\n\n".join(sources.ordered())
    body = "\n\n".join(
        (
            HEADER.format(
                module=module,
                weights=WEIGHTS,
                channels=int(model.shape[0]),
                height=int(model.shape[1]),
                width=int(model.shape[2]),
                output=model.output,
                pad=" " * max(0, 9 - len(model.output)),
            ),
            _imports(sources, {"import torch.nn.functional as F"} if model.output == "embedding" else set()),
            _constants(model),
            PART + (HAVING if "having(" in functions else ""),
            definitions + "\n",
            functions
            + "\n\n"
            + FOOTER.replace("    image = SCALED\n", _scaled(model))
            + (CLASSIFY if model.output == "logits" else RETRIEVE)
            + END,
        )
    )
    return "\n".join(line.rstrip() for line in body.split("\n")).rstrip("\n") + "\n"


def _imports(sources: Sources, further: set[str]) -> str:
    lines = {"import argparse", "import json", "import os", "import sys", "from pathlib import Path"}
    lines |= {"from collections.abc import Iterable", "from collections.abc import Iterator"}
    lines |= {"import torch", "from torch import Tensor", "from torch import nn"} | sources.imports | further
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
    classes = "\n".join(f"    {str(name)!r}," for name in model.classes)
    shape = tuple(int(size) for size in model.shape)
    mean, std = (tuple(float(value) for value in values) for values in (model.mean, model.std))
    comment = "# that the embedding was learnt from\n" if model.output == "embedding" else ""
    return (
        f"ABOUT = {{\n{facts}\n}}\n"
        f"SHAPE = {shape!r}  # of an image: channels, height, width\n"
        f"MEAN = {mean!r}\nSTD = {std!r}\n{comment}CLASSES = (\n{classes}\n)"
    )


def _scaled(model: Model) -> str:
    """The lines that bring a picture to its size as it was in training: scaled, and the centre taken."""
    (_, height, width), (rows, columns) = model.shape, model.scaled_to or model.shape[1:]
    how = "image.resize(" if model.whole else "ImageOps.fit(image, "
    lines = [f"image = {how}({columns}, {rows}), Image.Resampling.BILINEAR)"]
    if (rows, columns) != (height, width):
        lines.append(f"left, top = {(columns - width) // 2}, {(rows - height) // 2}  # only the centre is seen")
        lines.append("image = image.crop((left, top, left + width, top + height))")
    return "".join(f"    {line}\n" for line in lines)


def _function(name: str, expression: Expression) -> str:
    first, *rest = expression.lines()
    return "\n".join([f"def {name}() -> nn.Module:", f"    return {first}", *(f"    {line}" for line in rest)])


def check_python(file: Path, model: Model) -> float:
    """Runs the file with the weights beside it and compares; gives the largest relative difference."""
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
    """A Python file as a module that nobody else sees."""
    spec = importlib.util.spec_from_file_location("softcell_exported", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module
