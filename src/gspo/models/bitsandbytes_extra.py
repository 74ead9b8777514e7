"""The optional package bitsandbytes (extra `quant`): 4-bit weights, and optimiser state in 8 bits."""

from __future__ import annotations

import importlib
from typing import Any

from gspo.models import ModelError


def require_bitsandbytes(key: str) -> Any:
    """The package; a ModelError names the key that needs it."""
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ModelError(f"{key} needs bitsandbytes; install it with: pip install 'gspo[quant]'") from error
