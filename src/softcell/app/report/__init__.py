"""Drawings of architectures for pages and terminals, charts, reports and comparisons of runs."""

from softcell.app.report._cells_text import to_text
from softcell.app.report.cells_svg import to_svg
from softcell.app.report.charts import curves_svg
from softcell.app.report.heatmaps import heat_svg
from softcell.app.report.page import write_report

__all__ = ["curves_svg", "heat_svg", "to_svg", "to_text", "write_report"]
