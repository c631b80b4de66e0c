"""Draw docs/images/layers.svg, the diagram of the package's layers, from the order that tests/test_layers.py enforces.

python scripts/draw_layers.py
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "layers.svg"

ABOUT = {
    "arch": "choices, tables, mixes, genotypes",
    "nn": "candidates, objectives",
    "kernels": "fused kernels and twins",
    "data": "datasets, splits, batches",
    "engine": "loop, checkpoints, runs",
    "spaces": "supernets and derived networks",
    "methods": "one paper each: relax, derive",
    "search": "steps, tasks, budgets",
    "evaluate": "training, tables, latency",
    "seeds": "one recipe with several seeds",
    "recipes": "complete recipes from options, files and earlier runs",
    "testing": "conformance suites for candidates, spaces and methods",
    "api": "search, train and export from Python",
    "app.report": "HTML reports, comparisons",
    "app.export": "ONNX, Python, safetensors",
    "app.process": "process set-up of a command",
    "app.progress": "bars and lines of running jobs",
    "app.jobs": "one search or training run",
    "app.baseline": "comparison with random cells",
    "app.sweep": "methods × spaces × seeds",
    "app.pipeline": "softcell run",
    "app.reproduce": "softcell reproduce: the papers' tables",
    "app.cli": "the command line",
}

WIDTH, MARGIN, LABEL = 860, 24, 64
BOX, GAP, PAD = 52, 12, 16
STYLE = """
  .page { fill: #ffffff; } .core { fill: #eef2fb; } .shell { fill: #fbf3e6; } .ground { fill: #f1f1f1; }
  .box { fill: #ffffff; stroke: #5b6b8c; } .shell-box { fill: #ffffff; stroke: #a1763a; }
  .ground-box { fill: #ffffff; stroke: #888888; }
  text { font-family: system-ui, sans-serif; fill: #1c2333; } .name { font-size: 15px; font-weight: 600; }
  .about { font-size: 12px; fill: #4a5265; } .half { font-size: 14px; font-weight: 600; fill: #4a5265; }
  .arrow { stroke: #4a5265; stroke-width: 1.5; fill: none; } .tip { fill: #4a5265; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1b1e26; } .core { fill: #232b3d; } .shell { fill: #362c1e; } .ground { fill: #2a2a2d; }
    .box { fill: #1b2130; stroke: #8fa3cf; } .shell-box { fill: #261f15; stroke: #d0a566; }
    .ground-box { fill: #222225; stroke: #9a9a9a; }
    text { fill: #e8ebf2; } .about, .half { fill: #b4bccd; } .arrow { stroke: #b4bccd; } .tip { fill: #b4bccd; }
  }
"""


def picture(order: tuple[set[str], ...], core: set[str], ground: set[str]) -> str:
    """The SVG. order: layers from the bottom up, those of one set side by side; all may import `ground`."""
    rows = [sorted(together, key=list(ABOUT).index) for together in reversed(order)]
    shell_rows = [row for row in rows if not set(row) <= core]
    core_rows = [["testing"]] + [row for row in rows if set(row) <= core]  # suites use all of the core
    parts: list[str] = []
    y = MARGIN
    for title, kind, band in (("shell", "shell", shell_rows), ("core", "core", core_rows)):
        height = len(band) * (BOX + GAP) - GAP + 2 * PAD
        parts.append(_band(title, kind, y, height))
        for number, row in enumerate(band):
            parts += _row(row, y + PAD + number * (BOX + GAP), "shell-box" if kind == "shell" else "box")
        y += height + GAP
    height = BOX + 2 * PAD
    parts.append(_band("base", "ground", y, height))
    parts += _row([", ".join(sorted(ground))], y + PAD, "ground-box", "may be imported anywhere")
    y += height
    arrow = MARGIN + LABEL / 2 + 14
    parts.append(f'<path class="arrow" d="M {arrow} {MARGIN + PAD} V {y - PAD - 8}"/>')
    parts.append(f'<path class="tip" d="M {arrow - 5} {y - PAD - 10} h 10 l -5 10 z"/>')
    at = f"{arrow - 8} {(MARGIN + y) / 2}"
    parts.append(
        f'<text class="about" x="{arrow - 8}" y="{(MARGIN + y) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 {at})">imports</text>'
    )
    y += MARGIN
    title = "Layers of Softcell. A module imports only from the rows below it; the core never imports the shell."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{y}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _band(title: str, kind: str, y: float, height: float) -> str:
    x, middle = MARGIN + 14, y + height / 2
    return (
        f'<rect class="{kind}" x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="8"/>\n'
        f'<text class="half" x="{x}" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 {x} {middle})">{title}</text>'
    )


def _row(names: list[str], y: float, kind: str, about: str | None = None) -> list[str]:
    left, right = MARGIN + LABEL, WIDTH - MARGIN - PAD
    width = (right - left - (len(names) - 1) * GAP) / len(names)
    parts = []
    for i, name in enumerate(names):
        x = left + i * (width + GAP)
        centre = x + width / 2
        shown = name.replace("app.", "app/")
        parts.append(f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="{BOX}" rx="6"/>')
        parts.append(f'<text class="name" x="{centre:g}" y="{y + 22}" text-anchor="middle">{escape(shown)}</text>')
        said = escape(ABOUT[name] if about is None else about)
        parts.append(f'<text class="about" x="{centre:g}" y="{y + 40}" text-anchor="middle">{said}</text>')
    return parts


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.test_layers import CORE, GROUND, ORDER

    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(ORDER, CORE, GROUND), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
