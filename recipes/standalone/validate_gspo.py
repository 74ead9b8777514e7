"""Validate the installed program: `python validate_gspo.py`, the same as `gspo validate`. About two minutes."""

from __future__ import annotations

import sys

import checkout  # noqa: F401 - first, for a program that is not installed

from gspo.checks.validate import main

if __name__ == "__main__":
    sys.exit(main())
