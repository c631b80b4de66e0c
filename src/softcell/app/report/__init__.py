"""What is shown of architectures and searches: drawings for pages and terminals, charts."""

from softcell.app.report.curves import curves_svg, heat_svg
from softcell.app.report.drawing import Drawing
from softcell.app.report.graph import input_nodes, layered
from softcell.app.report.svg import to_svg
from softcell.app.report.text import to_text

__all__ = ["Drawing", "curves_svg", "heat_svg", "input_nodes", "layered", "to_svg", "to_text"]
