"""Cells that papers have published, in the notation of DARTS: `softcell reproduce` trains them beside found ones."""

from __future__ import annotations

CELLS = {
    # Liu et al., 2019: second order, CIFAR-10
    "DARTS_V2": (
        "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_3x3', 1), "
        "('sep_conv_3x3', 1), ('skip_connect', 0), ('skip_connect', 0), ('dil_conv_3x3', 2)], "
        "normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('skip_connect', 2), "
        "('max_pool_3x3', 1), ('max_pool_3x3', 0), ('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)], "
        "reduce_concat=range(2, 6))"
    ),
    # Xu et al., 2020: CIFAR-10
    "PC-DARTS": (
        "Genotype(normal=[('sep_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_3x3', 0), ('dil_conv_3x3', 1), "
        "('sep_conv_5x5', 0), ('sep_conv_3x3', 1), ('avg_pool_3x3', 0), ('dil_conv_3x3', 1)], "
        "normal_concat=range(2, 6), reduce=[('sep_conv_5x5', 1), ('max_pool_3x3', 0), ('sep_conv_5x5', 1), "
        "('sep_conv_5x5', 2), ('sep_conv_3x3', 0), ('sep_conv_3x3', 3), ('sep_conv_3x3', 1), ('sep_conv_3x3', 2)], "
        "reduce_concat=range(2, 6))"
    ),
    # Dong, Yang, 2019: GDAS_V1 of the authors' repository
    "GDAS": (
        "Genotype(normal=[('skip_connect', 0), ('skip_connect', 1), ('skip_connect', 0), ('sep_conv_5x5', 2), "
        "('sep_conv_3x3', 3), ('skip_connect', 0), ('sep_conv_5x5', 4), ('sep_conv_3x3', 3)], "
        "normal_concat=range(2, 6), reduce=[('sep_conv_5x5', 0), ('sep_conv_3x3', 1), ('sep_conv_5x5', 2), "
        "('sep_conv_5x5', 1), ('dil_conv_5x5', 2), ('sep_conv_3x3', 1), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1)], "
        "reduce_concat=range(2, 6))"
    ),
    # Xie et al., 2019: the cells of Table 2, one edge for every pair of nodes (`edge_all` of the authors' repository)
    "SNAS-mild": (
        "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('skip_connect', 0), ('dil_conv_3x3', 1),"
        " ('none', 2), ('skip_connect', 0), ('skip_connect', 1), ('none', 3), ('none', 2), ('skip_connect', "
        "0), ('sep_conv_3x3', 1), ('none', 4), ('none', 3), ('none', 2)], normal_concat=range(2, 6), "
        "reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('none', 0), ('max_pool_3x3', 1), ('skip_connect',"
        " 2), ('none', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('none', 3), ('max_pool_3x3', 0), "
        "('dil_conv_5x5', 2), ('none', 1), ('none', 3), ('none', 4)], reduce_concat=range(2, 6))"
    ),
    "SNAS-moderate": (
        "Genotype(normal=[('dil_conv_5x5', 0), ('skip_connect', 1), ('sep_conv_3x3', 0), ('skip_connect', 1),"
        " ('none', 2), ('skip_connect', 0), ('none', 3), ('none', 2), ('skip_connect', 1), ('sep_conv_3x3', "
        "0), ('dil_conv_5x5', 1), ('none', 4), ('none', 3), ('none', 2)], normal_concat=range(2, 6), "
        "reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('sep_conv_5x5', 0), ('none', 2), ('dil_conv_5x5',"
        " 1), ('none', 3), ('none', 2), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1), ('none', 4), ('none', 3), "
        "('none', 2), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1)], reduce_concat=range(2, 6))"
    ),
    "SNAS-aggressive": (
        "Genotype(normal=[('sep_conv_5x5', 0), ('skip_connect', 1), ('skip_connect', 0), ('skip_connect', 1),"
        " ('none', 2), ('dil_conv_5x5', 1), ('skip_connect', 0), ('none', 2), ('none', 3), ('skip_connect', "
        "0), ('dil_conv_5x5', 1), ('none', 2), ('none', 3), ('none', 4)], normal_concat=range(2, 6), "
        "reduce=[('sep_conv_5x5', 0), ('none', 1), ('sep_conv_5x5', 0), ('none', 1), ('none', 2), ('none', "
        "0), ('none', 1), ('none', 2), ('none', 3), ('none', 0), ('none', 1), ('none', 2), ('none', 3), "
        "('none', 4)], reduce_concat=range(2, 6))"
    ),
}
