"""Rewards of rollouts with turns: what the environment gave, what a reward function adds, what is missing."""

from __future__ import annotations

import dataclasses
from typing import Any

from gspo.rewards.protocol import Scorer
from gspo.types import Group, Reward, Rollout


class TurnScorer:
    """A Scorer that gives each rollout its environment's rewards.

    A rollout whose environment failed stays without a reward. One that its environment rewarded has the sum as its
    score; with `adds_function` the reward function grades it too, and its score belongs to the last turn. All other
    rollouts are left to the reward function, `inner`.
    """

    def __init__(self, inner: Scorer, *, adds_function: bool) -> None:
        self.inner = inner
        self._adds_function = adds_function
        self._pending: list[tuple[Group, list[int]]] = []  # with the rollouts that `inner` grades

    def submit(self, group: Group) -> None:
        graded = [i for i, rollout in enumerate(group.rollouts) if self._needs_function(rollout)]
        self._pending.append((group, graded))
        if graded:
            self.inner.submit(group.with_rollouts(tuple(group.rollouts[i] for i in graded)))

    def collect(self, num: int | None = None) -> list[Group]:
        pending = self._pending[:num]
        self._pending = self._pending[len(pending) :]
        num_graded = sum(bool(graded) for _, graded in pending)
        done = iter(self.inner.collect(num_graded) if num_graded else ())
        return [self._with_rewards(group, graded, next(done) if graded else None) for group, graded in pending]

    def close(self) -> None:
        self._pending = []
        self.inner.close()

    def _needs_function(self, rollout: Rollout) -> bool:
        return rollout.failure is None and (self._adds_function or not _is_rewarded(rollout))

    def _with_rewards(self, group: Group, graded: list[int], done: Group | None) -> Group:
        by_function = dict(zip(graded, done.rollouts)) if done is not None else {}
        return group.with_rollouts(tuple(_finish(r, by_function.get(i)) for i, r in enumerate(group.rollouts)))


def _is_rewarded(rollout: Rollout) -> bool:
    return any(turn.reward is not None for turn in rollout.turns)


def _finish(rollout: Rollout, graded: Rollout | None) -> Rollout:
    """A rollout with the reward of its environment and of the reward function, which graded it unless it is None."""
    if rollout.failure is not None:
        return rollout
    if graded is not None and (graded.reward is None or not rollout.turns):
        return graded
    own = [turn.reward or 0.0 for turn in rollout.turns]
    metrics: dict[str, Any] = {}
    for turn in rollout.turns:
        metrics |= turn.metrics
    acc = metrics.pop("acc", None)
    if graded is None or graded.reward is None:
        return rollout.with_reward(Reward(sum(own), acc, metrics, turns=tuple(own)))
    reward = graded.reward
    own[-1] += reward.score
    score = sum(own) if _is_rewarded(rollout) else reward.score
    known = acc if reward.acc is None else reward.acc
    extra = {**metrics, **reward.extra}
    return rollout.with_reward(dataclasses.replace(reward, score=score, acc=known, extra=extra, turns=tuple(own)))
