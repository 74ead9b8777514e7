"""Metrics of turns: each rollout counts once, however many turns and calls it has."""

from __future__ import annotations

from gspo.runs.turn_metrics import turn_metrics
from gspo.types import Rollout, Turn


def rollout(*turns: tuple[int, int]) -> Rollout:
    """A rollout with these numbers of calls and of errors by turn."""
    made = tuple(Turn(i, i + 1, num_calls=calls, num_errors=errors) for i, (calls, errors) in enumerate(turns))
    n = max(1, len(turns))
    return Rollout((5,) * n, (-1.0,) * n, (1,) * n, (0,) * n, "stop", turns=made)


def test_means_are_over_rollouts_and_the_share_is_of_rollouts_with_a_call():
    played = [rollout((2, 1), (3, 0), (0, 0)), rollout((0, 0)), rollout((0, 0), (1, 1)), rollout((0, 0), (0, 0))]
    values = {name: metric.result() for name, metric in turn_metrics([*played, rollout()]).items()}
    assert values == {
        "num_turns/mean": 2.0,
        "num_turns/max": 3,
        "num_turns/min": 1,
        "tool_calls/mean": 1.5,
        "tool_calls/max": 5,
        "tool_calls/min": 0,
        "tool_errors/mean": 0.5,
        "tool_errors/max": 1,
        "tool_errors/min": 0,
        "tool_calls/share": 0.5,
    }


def test_rollouts_without_turns_have_no_such_metrics():
    assert turn_metrics([rollout(), rollout()]) == {}
