"""Reports: statistics, figures and one self-contained HTML page, from run directories alone. No torch."""

from __future__ import annotations

from .arms import curves_from_csv
from .build import ReportFiles, build_report, build_report_from_csv
from .resampling import Speedup, speedup
from .summary import print_summary

__all__ = [
    "ReportFiles",
    "Speedup",
    "build_report",
    "build_report_from_csv",
    "curves_from_csv",
    "print_summary",
    "speedup",
]
