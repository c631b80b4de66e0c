"""Helpers of the search tests serve here too, and studies lie beside the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
sys.path.insert(0, str(Path(__file__).parents[2]))
