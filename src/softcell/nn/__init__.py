"""Candidate operations, blocks and objectives: what plugins build on."""

from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Candidate, Spec, candidate, get_candidate, known_candidates
from softcell.nn.conv import ReLUConvBN
from softcell.nn.norm import BatchNorm2d
from softcell.nn.objective import CrossEntropy, Evaluated, Objective
from softcell.nn.stochastic import draw_normal, draw_uniform

__all__ = [
    "BatchNorm2d",
    "Calibration",
    "Candidate",
    "CrossEntropy",
    "Evaluated",
    "Objective",
    "ReLUConvBN",
    "Spec",
    "candidate",
    "draw_normal",
    "draw_uniform",
    "get_candidate",
    "known_candidates",
]
