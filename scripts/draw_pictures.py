"""Create the images in the README and the documentation: a cell, a terminal and a report.

python scripts/draw_pictures.py        # needs chromium for the report
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
COMMAND = "search darts --space nb201 --epochs 6 --out runs/first"
WIDTH = 92


def cell() -> str:
    """The cells found by DARTS on CIFAR-10, from the record of the search."""
    from softcell.app.report import to_svg
    from softcell.arch import Genotype

    record = json.loads((ROOT / "results" / "entrannas" / "search-cifar10.json").read_text(encoding="utf-8"))
    (row,) = [row for row in record["rows"] if row["method"] == "darts"]
    return to_svg(Genotype.from_dict(row["result"]["genotype"]), "Cells that DARTS found on CIFAR-10")


def terminal() -> str:
    """The output of a search."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "softcell", *COMMAND.split()]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    screen = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    screen.print(Text(f"$ softcell {COMMAND}", "bold"))
    screen.print(Text(done.stdout.rstrip()))
    svg = screen.export_svg(title="softcell search", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts of another site


def report(file: Path) -> None:
    """The top of the report in the gallery."""
    page = (ROOT / "docs" / "gallery" / "report.html").as_uri()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1250"]
    subprocess.run(["chromium", *options, f"--screenshot={file}", page], check=True, capture_output=True)


if __name__ == "__main__":
    (IMAGES / "cell.svg").write_text(cell(), encoding="utf-8")
    (IMAGES / "terminal.svg").write_text(terminal(), encoding="utf-8")
    report(IMAGES / "report.png")
