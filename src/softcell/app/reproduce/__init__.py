"""The tables of the papers as plans that can be printed, run, stopped, resumed and recorded."""

from softcell.app.reproduce.plan import make_plan
from softcell.app.reproduce.record import make_record
from softcell.app.reproduce.run import run_plan

__all__ = ["make_plan", "make_record", "run_plan"]
