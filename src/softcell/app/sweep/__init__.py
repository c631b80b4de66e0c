"""Many runs from one short file: methods × spaces × seeds, on this machine or on a cluster."""

from softcell.app.sweep.launch import Outcome, run_sweep
from softcell.app.sweep.plan import Job, Plan, jobs_of, read_plan

__all__ = ["Job", "Outcome", "Plan", "jobs_of", "read_plan", "run_sweep"]
