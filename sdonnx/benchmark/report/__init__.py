"""The HTML report of a comparison, a single self-contained file."""

from __future__ import annotations

from sdonnx.benchmark.report.report_page import check_report, write_report

__all__ = ["check_report", "write_report"]
