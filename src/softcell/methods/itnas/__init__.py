"""IT-NAS, in a folder: the method, its mix, Lite-Transformers, attention sums and margins."""

from softcell.methods.itnas.method import HALVES, ItNas, ItNasSettings
from softcell.methods.itnas.mix import ItMix

__all__ = ["HALVES", "ItMix", "ItNas", "ItNasSettings"]
