"""Conformance suites: the contracts of candidates, spaces and methods, for built-in ones and your own.

Each contract is one function whose name states it; a suite is a tuple of them, so that pytest can run every contract
on every subject:

    @pytest.mark.parametrize("check", SPACE_CHECKS, ids=check_name)
    def test_my_space_keeps_its_contracts(check):
        check(MySpace())

A broken contract raises an `AssertionError` that says which one. `check_space`, `check_method` and `check_candidate`
run a whole suite.
"""

from softcell.testing.candidates import CANDIDATE_CHECKS, check_candidate
from softcell.testing.methods import METHOD_CHECKS, SAMPLER_CHECKS, check_method, checks_for
from softcell.testing.spaces import SPACE_CHECKS, check_space
from softcell.testing.tools import ALIKE, SOFTMAX_AT_HOME, RaggedSpace, check_name, one_hot, one_hot_live, tiny_space

__all__ = [
    "ALIKE",
    "CANDIDATE_CHECKS",
    "METHOD_CHECKS",
    "SAMPLER_CHECKS",
    "SOFTMAX_AT_HOME",
    "SPACE_CHECKS",
    "RaggedSpace",
    "check_candidate",
    "check_method",
    "check_name",
    "check_space",
    "checks_for",
    "one_hot",
    "one_hot_live",
    "tiny_space",
]
