"""Where the documentation is, and how to find the blocks of code in its pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""Language and text of a block."""
