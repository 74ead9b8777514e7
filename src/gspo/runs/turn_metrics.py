"""Metrics of turns and tool calls: each rollout counts once, however many turns it has."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.metrics import Metric, Metrics
from gspo.types import Rollout


def turn_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """`num_turns/*`, `tool_calls/*` and `tool_errors/*` of rollouts with turns; {} when none has any."""
    played = [rollout for rollout in rollouts if rollout.turns]
    if not played:
        return {}
    metrics: Metrics = {}
    for name, values in {
        "num_turns": [len(rollout.turns) for rollout in played],
        "tool_calls": [sum(turn.num_calls for turn in rollout.turns) for rollout in played],
        "tool_errors": [sum(turn.num_errors for turn in rollout.turns) for rollout in played],
    }.items():
        metrics[f"{name}/mean"] = Metric.mean(sum(values), len(values))
        metrics[f"{name}/max"] = Metric("max", max(values))
        metrics[f"{name}/min"] = Metric("min", min(values))
    called = sum(any(turn.num_calls for turn in rollout.turns) for rollout in played)
    metrics["tool_calls/share"] = Metric.mean(called, len(played))
    return metrics
