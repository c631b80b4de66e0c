"""From a folder of images to a trained, measured and exported network within a stated time: `softcell run`."""

from softcell.pipeline.plan import Plan
from softcell.pipeline.run import Outcome, run
from softcell.pipeline.screen import Screen
from softcell.pipeline.wishes import Wishes, parse_time

__all__ = ["Outcome", "Plan", "Screen", "Wishes", "parse_time", "run"]
