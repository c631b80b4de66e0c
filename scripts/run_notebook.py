"""Run the tutorial notebook in a real kernel and store its outputs, which the documentation shows.

python scripts/run_notebook.py        # needs nbclient and ipykernel
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times, which differ from run to run
        for output in cell.get("outputs", ()):
            assert output.output_type != "stream" or output.name == "stdout", f"{output.name}: {output.text}"
            # Pages show the HTML where there is some.
            output.get("data", {}).pop("text/plain", None) if "text/html" in output.get("data", {}) else None
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec",)}
    text = nbformat.writes(notebook)
    # Paths of the temporary folder differ from run to run.
    NOTEBOOK.write_text(re.sub(r"/tmp/[^/\"\s]+/", "", text) + "\n", encoding="utf-8")
    print(f"wrote {NOTEBOOK}", file=sys.stderr)


if __name__ == "__main__":
    main()
