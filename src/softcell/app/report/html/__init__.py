"""The report: one HTML file for one or many runs."""

from softcell.app.report.html.page import REPORT, render, report, write_report

__all__ = ["REPORT", "render", "report", "write_report"]
