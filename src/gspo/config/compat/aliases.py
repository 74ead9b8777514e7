"""Names that other systems use for our keys: one table of the name, the system and our key."""

from __future__ import annotations

from functools import cache

from gspo.config.compat import areal, standalone, trl, verl
from gspo.config.compat.alias import Alias as Alias


@cache
def aliases() -> dict[str, Alias]:
    """Every alias by name."""
    table: dict[str, Alias] = {}
    for alias in (*standalone.ALIASES, *verl.ALIASES, *areal.ALIASES, *trl.ALIASES):
        assert alias.name not in table, f"alias {alias.name} is defined twice"
        table[alias.name] = alias
    return table


def aliases_of(key: str) -> list[Alias]:
    """The aliases of a key."""
    return [a for a in aliases().values() if a.target == key]
