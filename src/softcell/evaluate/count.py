"""What a network costs; counting itself lives with the spaces, since a search counts too."""

from softcell.spaces.count import Cost, count_genotype, count_module

__all__ = ["Cost", "count_genotype", "count_module"]
