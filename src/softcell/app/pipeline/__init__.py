"""From a folder of images to a trained, measured and exported network within a given time: `softcell run`."""

from softcell.app.pipeline._front import Front, FrontEntry
from softcell.app.pipeline._plan import Plan, RunRequest
from softcell.app.pipeline._run import RunResult, run
from softcell.app.pipeline._summary import Beside, Decision, Entry, Result, Round, Row, Summary, verdict
from softcell.app.progress import Screen
from softcell.text import parse_time

__all__ = [
    "Beside",
    "Decision",
    "Entry",
    "Front",
    "FrontEntry",
    "Plan",
    "Result",
    "Round",
    "Row",
    "RunRequest",
    "RunResult",
    "Screen",
    "Summary",
    "parse_time",
    "run",
    "verdict",
]
