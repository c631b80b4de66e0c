"""What a trained network gets wrong: the confusion matrix and the images it was most wrong about."""

from __future__ import annotations

import base64
import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from softcell.app.report.html.elements import Html, el, join, percent, table
from softcell.app.report.html.weights import shade
from softcell.app.report.runs import Run, mapping

MOST_CLASSES = 24  # beyond, a matrix is a wall: the largest confusions say more
MOST_PAIRS = 12
SHOWN = 12

# Dark blue over grey to yellow: even steps in lightness, so that it reads without colour too.
_RAMP = torch.tensor(
    [[0, 32, 77], [70, 80, 108], [124, 123, 120], [185, 170, 108], [255, 234, 70]], dtype=torch.float32
)


def class_names(run: Run) -> list[str]:
    """Names of the classes; numbers where the run does not say them."""
    names = mapping(run.results.get("data")).get("classes")
    known = [str(name) for name in names] if isinstance(names, list) else []
    top = 0
    if run.predictions is not None and len(run.predictions["labels"]):
        top = 1 + max(int(run.predictions["labels"].max()), int(run.predictions["predicted"].max()))
    return known + [f"class {i}" for i in range(len(known), top)]


def confusion(run: Run) -> Html | None:
    """The confusion matrix, or for many classes the most frequent confusions."""
    if run.predictions is None or not len(run.predictions["labels"]):
        return None
    names = class_names(run)
    labels, predicted = (run.predictions[name].long().clamp_min(0) for name in ("labels", "predicted"))
    size = len(names)
    counts = torch.bincount(labels * size + predicted, minlength=size * size).view(size, size)
    total = counts.sum(1)
    pairs = _pairs(counts, names)
    if size > MOST_CLASSES:
        worst = torch.argsort(counts.diagonal() / total.clamp_min(1), stable=True)[:MOST_PAIRS].tolist()
        hard = [(names[i], percent(float(counts[i, i] / total[i])), str(int(total[i]))) for i in worst if total[i]]
        classes = table(("class", "right", "images"), hard, numeric=(1, 2))
        return el(
            "div",
            el("figure", el("figcaption", "the hardest classes"), classes, class_="card"),
            el("figure", el("figcaption", "the most frequent confusions"), pairs, class_="card"),
            class_="pair",
        )
    rows = []
    for i, name in enumerate(names):
        cells = []
        for j in range(size):
            share = float(counts[i, j] / total[i]) if total[i] else 0.0
            style = f"h{shade(round(100 * share))}" + (" picked" if i == j else "")
            said = f"{int(counts[i, j])} of {int(total[i])} images of {name} were called {names[j]}"
            cells.append(el("td", str(int(counts[i, j])) if counts[i, j] else "·", class_=style, title=said))
        right = percent(float(counts[i, i] / total[i]), 0) if total[i] else "–"
        rows.append(el("tr", el("th", name, scope="row"), cells, el("td", right, class_="side")))
    head = el("tr", el("td"), [el("th", el("span", name), scope="col") for name in names], el("th", "right"))
    matrix = el("table", el("thead", head), el("tbody", rows), class_="heat square")
    return el(
        "div",
        el(
            "figure",
            el("figcaption", "rows: what it is; columns: what the network said"),
            el("div", matrix, class_="scroll fade", tabindex=0),
            class_="card",
        ),
        el("figure", el("figcaption", "the most frequent confusions"), pairs, class_="card"),
        class_="pair",
    )


def _pairs(counts: Tensor, names: list[str]) -> Html:
    wrong = counts.clone()
    wrong.fill_diagonal_(0)
    order = torch.argsort(wrong.flatten(), descending=True, stable=True)[:MOST_PAIRS].tolist()
    rows = [divmod(k, len(names)) for k in order if int(wrong.flatten()[k])]
    if not rows:
        return el("p", "Not a single mistake.", class_="quiet")
    return table(
        ("is", "was called", "times"), [(names[i], names[j], str(int(wrong[i, j]))) for i, j in rows], numeric=(2,)
    )


def most_wrong(run: Run) -> Html | None:
    """The images with the most confidence in a wrong class, each with what Grad-CAM says the network looked at."""
    found = run.predictions
    if found is None or "worst" not in found:
        return None
    names, heat = class_names(run), found.get("heat")
    cards = []
    for place, index in enumerate(found["worst"].tolist()[:SHOWN]):
        label, said = (names[max(0, int(found[key][index]))] for key in ("labels", "predicted"))
        confidence, truth = float(found["confidence"][index]), float(found["truth"][index])
        image = found["images"][place]
        described = f"test image {index}: {label}, taken for {said}"
        pictures = [_img(image, described, "plain")]
        if heat is not None:
            pictures.append(_img(overlay(image, heat[place]), f"where the network looked in {described}", "cam"))
        cards.append(
            el(
                "figure",
                el("div", pictures, class_="pictures"),
                el(
                    "figcaption",
                    join(el("span", "is ", el("b", label)), el("span", "called ", el("b", said))),
                    el("span", f"{percent(confidence, 0)} sure, {percent(truth, 0)} for {label}", class_="quiet"),
                ),
                class_="wrong",
            )
        )
    control = None
    if heat is not None:
        control = el(
            "label",
            el("input", type="checkbox", class_="cams", checked=True),
            " show where the network looked (Grad-CAM of the class it named, last cell; bright yellow: much, "
            "dark blue: little)",
            class_="check",
        )
    return el("div", control, el("div", cards, class_="gallery"), class_="mistakes cams-on")


def overlay(image: Tensor, heat: Tensor) -> Tensor:
    """The image uint8 [c, h, w] in grey under the colours of `heat` [h', w'] in 0..1; uint8 [3, H, W]."""
    height, width = image.shape[1:]
    scale = max(1, 64 // max(height, width))  # small images get room for a smooth map
    grey = image.float().mean(0, keepdim=True)[None]
    grey = F.interpolate(grey, scale_factor=scale, mode="nearest")[0]
    wide = F.interpolate(heat[None, None].float(), size=grey.shape[1:], mode="bilinear", align_corners=False)[0, 0]
    position = wide.clamp(0, 1) * (len(_RAMP) - 1)
    low = position.floor().long().clamp_max(len(_RAMP) - 2)
    share = (position - low)[..., None]
    colour = (_RAMP[low] * (1 - share) + _RAMP[low + 1] * share).permute(2, 0, 1)
    return (0.45 * grey + 0.55 * colour).round().clamp(0, 255).to(torch.uint8)


def _img(pixels: Tensor, described: str, style: str) -> Html:
    """An image uint8 [c, h, w] as an element that holds its own bytes."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
    sharp = " pixels" if max(pixels.shape[1:]) < 100 else ""
    return el("img", src=source, alt=described, class_=style + sharp, width=pixels.shape[2], height=pixels.shape[1])
