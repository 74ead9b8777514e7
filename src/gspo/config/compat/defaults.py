"""Defaults of other systems that differ from ours in what is trained: they hold where a system's own door is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor"

# System → our key → (its value there, the origin that is shown).
SYSTEM_DEFAULTS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "verl": {f"{ACTOR}.policy_loss.loss_mode": ("vanilla", "default of verl")}
}
