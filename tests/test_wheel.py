"""The wheel contains the whole package, its data and its type marker."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import softcell

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs the build backend, which `make setup` installs")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("softcell-*.whl")
    version = softcell.__version__  # which run folders record, too
    assert wheel.name.startswith(f"softcell-{version}-")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "softcell"
    wanted = {
        f"softcell/{file.relative_to(package).as_posix()}"
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert wanted <= names, f"not in the wheel: {sorted(wanted - names)}"
    assert {"softcell/py.typed", "softcell/data/assets/digits.npz"} <= names
