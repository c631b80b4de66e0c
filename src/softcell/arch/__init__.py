"""Architectures as plain data: choices, tables, mixes, genotypes, notations and derivation rules."""

from softcell.arch.choice import Choice, Layout, Pick, Table
from softcell.arch.derive import Positive, Rule, StrongestEach, TopInputs, count, derive, sample
from softcell.arch.genotype import Cell, Genotype, check_against
from softcell.arch.mix import Live, Mix, Plan, WeightMix
from softcell.arch.pairs import FeaturePairs

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
    "sample",
]
