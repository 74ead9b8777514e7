"""Keys and values that nothing acts on yet, each with the capability that will. Tests keep the tables true.

Setting one gives a warning; where ignoring it would train something else than was asked for, training is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gspo.config.loading import tree
from gspo.config.loading.settings_table import Settings
from gspo.config.problems import Problem

WAITS = "nothing acts on it yet"
_WAITING: dict[str, tuple[str, ...]] = {
    "scale-out: sequences over several devices": ("actor_rollout_ref.actor.ulysses_sequence_parallel_size",),
}
PENDING: dict[str, str] = {key: capability for capability, keys in _WAITING.items() for key in keys}

PENDING_VALUES: dict[tuple[str, Any], str] = {}

# Ignoring these would train something else than was asked for.
_ESSENTIAL: tuple[str, ...] = ()


def unmet(settings: Settings) -> Iterator[Problem]:
    """A warning for everything that was set and that nothing acts on yet."""
    for key, setting in settings.items():
        capability = PENDING_VALUES.get((key, setting.value)) if _hashable(setting.value) else None
        if capability is None and setting.value != tree.leaves()[key].default and setting.origin.explicit:
            capability = PENDING.get(key)
        if capability is not None:
            message = f"{WAITS}: it waits for {capability}"
            yield Problem("warning", key, setting.value, setting.origin.text, message, "remove it")


def essential(problems: tuple[Problem, ...]) -> list[Problem]:
    """Those of a config's warnings that must stop a training: something else would be trained."""
    return [
        p
        for p in problems
        if WAITS in p.message and (p.key in _ESSENTIAL or (p.key, p.value) in PENDING_VALUES)
    ]


def _hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)
