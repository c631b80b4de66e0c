"""Architectures as plain data: choices, tables, mixes, genotypes, notations and derivation rules."""

from softcell.arch.choice import Choice, Layout, Pick, Table
from softcell.arch.derive import count, derive, derive_cheapest, derives_cheapest, sample
from softcell.arch.genotype import Cell, Genotype, check_against, empty_cells
from softcell.arch.mix import Live, Mix, Plan, WeightMix, masked_softmax
from softcell.arch.rules import FeaturePairs, Positive, Rule, StrongestEach, TopInputs

__all__ = [
    "Cell",
    "Choice",
    "FeaturePairs",
    "Genotype",
    "Layout",
    "Live",
    "Mix",
    "Pick",
    "Plan",
    "Positive",
    "Rule",
    "StrongestEach",
    "Table",
    "TopInputs",
    "WeightMix",
    "check_against",
    "count",
    "derive",
    "derive_cheapest",
    "derives_cheapest",
    "empty_cells",
    "masked_softmax",
    "sample",
]
