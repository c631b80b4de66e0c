"""The three cells that the authors of SNAS published (Table 2), as facts: operation and source of every edge.

From genotypes.py of github.com/SNAS-Series/SNAS-Series, in the order of the file.
"""

EDGE_ALL = {
    "mild": (
        "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('skip_connect', 0), ('dil_conv_3x3', 1),"
        " ('none', 2), ('skip_connect', 0), ('skip_connect', 1), ('none', 3), ('none', 2), ('skip_connect', "
        "0), ('sep_conv_3x3', 1), ('none', 4), ('none', 3), ('none', 2)], normal_concat=range(2, 6), "
        "reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('none', 0), ('max_pool_3x3', 1), ('skip_connect',"
        " 2), ('none', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('none', 3), ('max_pool_3x3', 0), "
        "('dil_conv_5x5', 2), ('none', 1), ('none', 3), ('none', 4)], reduce_concat=range(2, 6))"
    ),
    "moderate": (
        "Genotype(normal=[('dil_conv_5x5', 0), ('skip_connect', 1), ('sep_conv_3x3', 0), ('skip_connect', 1),"
        " ('none', 2), ('skip_connect', 0), ('none', 3), ('none', 2), ('skip_connect', 1), ('sep_conv_3x3', "
        "0), ('dil_conv_5x5', 1), ('none', 4), ('none', 3), ('none', 2)], normal_concat=range(2, 6), "
        "reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('sep_conv_5x5', 0), ('none', 2), ('dil_conv_5x5',"
        " 1), ('none', 3), ('none', 2), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1), ('none', 4), ('none', 3), "
        "('none', 2), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1)], reduce_concat=range(2, 6))"
    ),
    "aggressive": (
        "Genotype(normal=[('sep_conv_5x5', 0), ('skip_connect', 1), ('skip_connect', 0), ('skip_connect', 1),"
        " ('none', 2), ('dil_conv_5x5', 1), ('skip_connect', 0), ('none', 2), ('none', 3), ('skip_connect', "
        "0), ('dil_conv_5x5', 1), ('none', 2), ('none', 3), ('none', 4)], normal_concat=range(2, 6), "
        "reduce=[('sep_conv_5x5', 0), ('none', 1), ('sep_conv_5x5', 0), ('none', 1), ('none', 2), ('none', "
        "0), ('none', 1), ('none', 2), ('none', 3), ('none', 0), ('none', 1), ('none', 2), ('none', 3), "
        "('none', 4)], reduce_concat=range(2, 6))"
    ),
}
"""One edge for every pair of nodes; the authors train these."""

TWO_EDGES = {
    "mild": (
        "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('skip_connect', 0), ('dil_conv_3x3', 1),"
        " ('skip_connect', 0), ('skip_connect', 1), ('skip_connect', 0), ('sep_conv_3x3', 1)], "
        "normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('max_pool_3x3', 1), "
        "('skip_connect', 2), ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 0), ('dil_conv_5x5',"
        " 2)], reduce_concat=range(2, 6))"
    ),
    "moderate": (
        "Genotype(normal=[('dil_conv_5x5', 0), ('skip_connect', 1), ('sep_conv_3x3', 0), ('skip_connect', 1),"
        " ('skip_connect', 0), ('skip_connect', 1), ('sep_conv_3x3', 0), ('dil_conv_5x5', 1)], "
        "normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('sep_conv_5x5', 0), "
        "('dil_conv_5x5', 1), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1), ('sep_conv_5x5', 0), ('sep_conv_5x5',"
        " 1)], reduce_concat=range(2, 6))"
    ),
    "aggressive": (
        "Genotype(normal=[('sep_conv_5x5', 0), ('skip_connect', 1), ('skip_connect', 0), ('skip_connect', 1),"
        " ('dil_conv_5x5', 1), ('skip_connect', 0), ('skip_connect', 0), ('dil_conv_5x5', 1)], "
        "normal_concat=range(2, 6), reduce=[('sep_conv_5x5', 0), ('none', 1), ('sep_conv_5x5', 0), ('none', "
        "1), ('none', 1), ('none', 0), ('none', 1), ('none', 0)], reduce_concat=range(2, 6))"
    ),
}
"""Two edges per node."""

NONE = {
    "mild": {"normal": 6, "reduce": 6},
    "moderate": {"normal": 6, "reduce": 6},
    "aggressive": {"normal": 6, "reduce": 12},
}
"""Edges that are `none`."""
