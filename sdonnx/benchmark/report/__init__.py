"""The page that a comparison is published as: one HTML file with everything in it."""

from __future__ import annotations

from sdonnx.benchmark.report.page import refuse_report, write_report

__all__ = ["refuse_report", "write_report"]
