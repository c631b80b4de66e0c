"""What is shown of architectures and searches: drawings for pages and terminals, charts."""

from softcell.report.curves import curves_svg, heat_svg
from softcell.report.drawing import Drawing
from softcell.report.graph import input_nodes, layered
from softcell.report.svg import to_svg
from softcell.report.text import to_text

__all__ = ["Drawing", "curves_svg", "heat_svg", "input_nodes", "layered", "to_svg", "to_text"]
