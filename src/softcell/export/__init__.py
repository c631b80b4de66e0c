"""Trained networks for use elsewhere: ONNX, one Python file, safetensors, torch.export."""

from softcell.export.model import Model, read_model, trained_folder
from softcell.export.write import FORMATS, Exported, Format, export, format_named

__all__ = ["FORMATS", "Exported", "Format", "Model", "export", "format_named", "read_model", "trained_folder"]
