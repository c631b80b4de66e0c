"""From a folder of images to a trained, measured and exported network within a stated time: `softcell run`."""

from softcell.app.pipeline.plan import Plan
from softcell.app.pipeline.run import Outcome, run
from softcell.app.pipeline.screen import Screen
from softcell.app.pipeline.wishes import Wishes, parse_time

__all__ = ["Outcome", "Plan", "Screen", "Wishes", "parse_time", "run"]
