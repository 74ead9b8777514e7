"""Rewards of several kinds added up: functions, judges and a reward model, each with its own scorer.

sampler ── submit(group) ──▶ MixedScorer ──┬─▶ functions (PoolScorer)
                                           ├─▶ a judge (JudgeScorer), its calls run while generation goes on
                                           └─▶ the reward model (ModelScorer), which scores when it is collected
sampler ── collect() ──────▶ MixedScorer ──── waits for all of them and adds the weighted scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gspo.metrics import Metric, Metrics, merge_metrics
from gspo.rewards.compose import PLAIN, Finishing, unique_name
from gspo.rewards.protocol import Graded, Scorer
from gspo.types import Group, Reward, Rollout


@runtime_checkable
class Measured(Protocol):
    """A scorer with metrics of its own, and perhaps a budget."""

    def observe(self) -> Metrics:
        """The metrics since the last call."""
        ...

    def over_budget(self) -> str | None:
        """Why the run must end; None while it may go on."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One of the rewards that are added up.

    `kind` decides how it is compared with the rule: a judge of single responses by its verdict, others by the order in
    which they put the responses of a group. A part of weight 0 is only logged.
    """

    name: str
    scorer: Scorer
    weight: float = 1.0
    kind: str = "rule"  # or "judge", "model"
    orders: bool = False  # its scores have no fixed meaning; only their order within a group has


class MixedScorer:
    """A Scorer that adds the weighted scores of its parts. The reward is missing where a part with a weight failed.

    The functions' accuracy is that of the reward; without one, a judge's. `reward/<name>` is the score of each part.
    Where the functions return an accuracy, `observe` says how often a judge or the model disagrees with it.
    """

    def __init__(self, parts: Sequence[Part], finishing: Finishing = PLAIN) -> None:
        self.parts = list(parts)
        self._finishing = finishing
        self._pending: list[Group] = []
        self._disagreement: dict[str, tuple[float, int]] = {}

    def submit(self, group: Group) -> None:
        self._pending.append(group)
        for part in self.parts:
            part.scorer.submit(group)

    def collect(self, num: int | None = None) -> list[Group]:
        pending = self._pending[:num]
        self._pending = self._pending[len(pending) :]
        columns = [part.scorer.collect(num) for part in self.parts]
        return [self._merge(group, column) for group, column in zip(pending, zip(*columns, strict=True), strict=True)]

    def observe(self) -> Metrics:
        """The metrics of the parts, and for each kind its disagreement with the rule since the last call."""
        metrics: Metrics = {}
        for part in self.parts:
            if isinstance(part.scorer, Measured):
                merge_metrics(metrics, part.scorer.observe())
        for kind, (total, count) in self._disagreement.items():
            prefix = "judge" if kind == "judge" else "reward_model"
            metrics[f"{prefix}/disagreement"] = Metric.mean(total, count)
        self._disagreement = {}
        return metrics

    def state_dict(self) -> dict[str, list[float]]:
        """What `observe` has counted so far."""
        return {kind: list(counts) for kind, counts in self._disagreement.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._disagreement = {kind: (float(total), int(count)) for kind, (total, count) in state.items()}

    def over_budget(self) -> str | None:
        """Why the run must end after this step; None while it may go on."""
        scorers = [part.scorer for part in self.parts if isinstance(part.scorer, Measured)]
        return next((reason for scorer in scorers if (reason := scorer.over_budget()) is not None), None)

    def close(self) -> None:
        self._pending = []
        for part in self.parts:
            part.scorer.close()

    def _merge(self, group: Group, column: Sequence[Group]) -> Group:
        found = list(zip(self.parts, column, strict=True))
        self._compare(found)
        rollouts = []
        for index, rollout in enumerate(group.rollouts):
            graded = _add([(part, done.rollouts[index]) for part, done in found])
            rollouts.append(self._finishing.apply(rollout, graded))
        return group.with_rollouts(tuple(rollouts))

    def _compare(self, found: Sequence[tuple[Part, Group]]) -> None:
        """Count how often each judge or model disagrees with the rule, where both have an opinion."""
        rule = next((done for part, done in found if part.kind == "rule"), None)
        if rule is None:
            return
        for part, done in found:
            pairs = [
                (a.reward.acc, b.reward.score)
                for a, b in zip(rule.rollouts, done.rollouts)
                if a.reward is not None and a.reward.acc is not None and b.reward is not None
            ]
            if part.kind != "rule" and pairs:
                total, count = (wrong_order if part.orders else wrong_verdicts)(pairs)
                before = self._disagreement.get(part.kind, (0.0, 0))
                self._disagreement[part.kind] = before[0] + total, before[1] + count


def wrong_verdicts(pairs: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """How many of (accuracy, score) lie on different sides of 0.5, and how many there are."""
    return float(sum((acc >= 0.5) != (score >= 0.5) for acc, score in pairs)), len(pairs)


def wrong_order(pairs: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Of the pairs of responses that differ in accuracy, how many the scores order otherwise; a tie counts as half."""
    total, count = 0.0, 0
    for acc, score in pairs:
        for other_acc, other_score in pairs:
            if acc > other_acc:
                count += 1
                total += 1.0 if score < other_score else 0.5 if score == other_score else 0.0
    return total, count


def _add(found: Sequence[tuple[Part, Rollout]]) -> Graded:
    """The weighted sum of a response's parts, or the failure of one that has a weight."""
    score, noise, acc = 0.0, 0.0, None
    extra: dict[str, float] = {}
    parts: dict[str, float] = {}
    notes: dict[str, object] = {}
    for part, rollout in found:
        reward = rollout.reward
        if reward is None:
            if part.weight:
                return f"{part.name}: {rollout.failure}"
            continue
        score += part.weight * reward.score
        noise += abs(part.weight) * reward.noise
        acc = reward.acc if acc is None else acc
        own = {name: value for name, value in reward.extra.items() if name.startswith("reward/")}
        extra |= {name: value for name, value in reward.extra.items() if name not in own}
        parts |= own or {unique_name(f"reward/{part.name}", parts): reward.score}
        if reward.notes:
            notes[part.name] = dict(reward.notes)
    return Reward(score, acc, extra | parts, noise=noise, notes=notes)
