"""Seeing a run: report page, live dashboard, comparison and run card. Reads run folders only, never imports torch."""

from __future__ import annotations

from gspo.report.write import write_report

__all__ = ["write_report"]
