"""Trained networks for use elsewhere: ONNX in float or int8, one Python file, safetensors, torch.export."""

from softcell.app.export.graph import Quantised
from softcell.app.export.model import ImageClassifier, Model, predict, read_classifier, read_model, trained_folder
from softcell.app.export.write import FORMATS, Exported, Format, Ready, export, format_named, ready

__all__ = [
    "FORMATS",
    "Exported",
    "Format",
    "ImageClassifier",
    "Model",
    "Quantised",
    "Ready",
    "export",
    "format_named",
    "predict",
    "read_classifier",
    "read_model",
    "ready",
    "trained_folder",
]
