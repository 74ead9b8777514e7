"""Keys that nothing reads yet, each with the capability that will. A test keeps the table true and shrinking."""

from __future__ import annotations

PENDING: dict[str, str] = {}
