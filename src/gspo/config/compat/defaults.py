"""Defaults of other systems that differ from ours in what is trained: they hold where a system's own door is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor"

_VERL = {f"{ACTOR}.policy_loss.loss_mode": "vanilla"}

# System → our key → its value there. "verl" is its program, which also chooses the devices; "verl's classes" does not.
SYSTEM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"verl": _VERL, "verl's classes": _VERL}
