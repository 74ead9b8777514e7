"""Keys of other systems that have no effect here, or only some values: looked up by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gspo.config.compat import areal, trl, verl
from gspo.config.compat.alias import Fixed

NO_EFFECT: Mapping[str, str] = {**verl.NO_EFFECT, **areal.NO_EFFECT, **trl.NO_EFFECT}
FIXED: Mapping[str, Fixed] = {**verl.FIXED, **areal.FIXED, **trl.FIXED}


def why_unneeded(name: str) -> str | None:
    """Why a key, or the section it is in, has no effect here; None for any other name."""
    for part in _prefixes(name):
        if part in NO_EFFECT:
            return NO_EFFECT[part]
    return next((verl.ANYWHERE[part] for part in name.split(".") if part in verl.ANYWHERE), None)


def fixed_values(name: str) -> Fixed | None:
    """The only values that a key of another system may have here; None for any other name."""
    return FIXED.get(name)


def _prefixes(name: str) -> Iterator[str]:
    """The name and the sections it is in, the innermost first."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))
