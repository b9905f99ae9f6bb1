"""Reports: statistics, figures and one self-contained HTML page, from run directories alone. Does not import torch."""

from __future__ import annotations

from .build import build_report
from .outputs import ReportFiles, print_summary

__all__ = [
    "ReportFiles",
    "build_report",
    "print_summary",
]
