"""Importing this makes `import gspo` work where the program is not installed: it is read from this checkout."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("gspo") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
