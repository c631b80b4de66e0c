"""Datasets, seeded splits, device-resident batches and hashed augmentation."""

from softcell.data.arrays import keep_arrays
from softcell.data.augment import Augment, augment, normalise
from softcell.data.batches import Batch, Batches
from softcell.data.catalogue import datasets, load
from softcell.data.dataset import Dataset
from softcell.data.images import Files, Images, Resident
from softcell.data.splits import fingerprint, split, test_set_sealed

__all__ = [
    "Augment",
    "Batch",
    "Batches",
    "Dataset",
    "Files",
    "Images",
    "Resident",
    "augment",
    "datasets",
    "fingerprint",
    "keep_arrays",
    "load",
    "normalise",
    "split",
    "test_set_sealed",
]
