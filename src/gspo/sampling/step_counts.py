"""Counts of what one training step generated, kept and dropped."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.metrics import Metric, Metrics
from gspo.types import Group, Rollout

DROP_REASONS = ("all_right", "all_wrong", "same_score", "reward_failed")


@dataclass(slots=True)
class SamplingCounts:
    """Counts of one training step. A group is counted in the step in which it was judged or dropped as surplus.

    `fates` counts the groups judged in this step by verdict (`kept` or why dropped); `num_carried` is what was left
    in flight or queued for the next step; `discarded` counts `stale_dropped` and `surplus` groups, whose prompts
    were put back. `weights` (1/q per group, aligned with the batch) is there when `predict_weight` is on.
    """

    version: int
    gen_batch_size: int
    num_needed: int
    num_submitted: int = 0
    num_skipped: int = 0
    num_carried: int = 0
    num_unfiltered: int = 0  # dropped groups that were trained on after all (on_limit: keep_unfiltered)
    num_trained: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)
    generated_tokens: int = 0
    wasted_tokens: int = 0
    num_rollouts: int = 0
    num_failed_rewards: int = 0
    first_failure: str | None = None
    score_sum: float = 0.0
    staleness_sum: int = 0
    staleness_max: int = 0
    weights: tuple[float, ...] | None = None
    num_played: int = 0  # judged rollouts with an environment
    num_environment_failures: int = 0
    num_cut_observations: int = 0
    predicted_mixed: float = 0.0  # summed over judged groups whose prompt the ledger knew
    num_predicted: int = 0

    @property
    def num_generated(self) -> int:
        """Groups judged in this step."""
        return sum(self.fates.values())

    @property
    def num_gen_batches(self) -> int:
        """Generation batches submitted in this step, a begun one counted whole."""
        return -(-self.num_submitted // self.gen_batch_size)

    @property
    def num_scored(self) -> int:
        return self.num_rollouts - self.num_failed_rewards

    @property
    def failure_rate(self) -> float:
        """Share of judged rollouts whose reward could not be computed."""
        return self.num_failed_rewards / self.num_rollouts if self.num_rollouts else 0.0

    def add_generated(self, group: Group) -> None:
        """Count a group that came back from the scorer, before it is judged."""
        self.generated_tokens += group.num_tokens
        self.num_rollouts += len(group.rollouts)
        for rollout in group.rollouts:
            self._add_turns(rollout)
            if rollout.reward is not None:
                self.score_sum += rollout.reward.score
                continue
            self.num_failed_rewards += 1
            if self.first_failure is None:
                self.first_failure = f"prompt {group.prompt.uid!r}: {rollout.failure or 'no reason given'}"

    def _add_turns(self, rollout: Rollout) -> None:
        failed = rollout.failure is not None and rollout.finish_reason == "environment"
        self.num_played += bool(rollout.turns) or failed
        self.num_environment_failures += failed
        self.num_cut_observations += sum(turn.num_cut for turn in rollout.turns)

    def add_prediction(self, mixed: float | None) -> None:
        """Count what the ledger expected of a judged group."""
        if mixed is not None:
            self.predicted_mixed += mixed
            self.num_predicted += 1

    def add_trained(self, groups: list[Group], *, num_unfiltered: int = 0) -> None:
        """Count the groups handed to the trainer."""
        self.num_trained, self.num_unfiltered = len(groups), num_unfiltered
        ages = [self.version - group.version for group in groups]
        self.staleness_sum, self.staleness_max = sum(ages), max(ages, default=0)

    def seen(self) -> str:
        """One sentence of counts for messages."""
        counts = ", ".join(f"{self.fates[reason]} {reason}" for reason in self._drop_reasons())
        return f"{self.num_generated} groups judged in this step: {self.fates['kept']} kept, {counts}"

    def _drop_reasons(self) -> tuple[str, ...]:
        """Why groups may be dropped; `filtered` only where the user's filter dropped some."""
        return (*DROP_REASONS, *(("filtered",) if "filtered" in self.fates else ()))

    def pack(self, num_skipped: int) -> dict[str, Any]:
        """The counts so far as plain JSON, for a checkpoint taken before the step's batch is handed out."""
        packed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        counters = {"fates": dict(self.fates), "discarded": dict(self.discarded)}
        return packed | counters | {"num_skipped": num_skipped}

    @staticmethod
    def unpack(data: Mapping[str, Any]) -> SamplingCounts:
        """The inverse of `pack`."""
        counters = {name: Counter(data[name]) for name in ("fates", "discarded")}
        return SamplingCounts(**{**data, **counters, "weights": None})

    def metrics(self) -> Metrics:
        """The step's metrics, under the names of every strategy. What was not measured is left out.

        A step that lives on groups of earlier ones may judge none, and then it has no score of its own.
        """
        counts = {
            "num_gen_batches": self.num_gen_batches,
            "groups_generated": self.num_generated,
            "groups_trained": self.num_trained,
            "groups_kept": self.fates["kept"],
            **{f"groups_{reason}": self.fates[reason] for reason in self._drop_reasons()},
            "groups_carried": self.num_carried,
            "groups_stale_dropped": self.discarded["stale_dropped"],
            "groups_surplus": self.discarded["surplus"],
            "groups_unfiltered": self.num_unfiltered,
            "groups_skipped": self.num_skipped,
            "generated_tokens": self.generated_tokens,
            "wasted_tokens": self.wasted_tokens,
            "reward_failures": self.num_failed_rewards,
        }
        metrics = {f"train/{name}": Metric("sum", value) for name, value in counts.items()}
        metrics["train/staleness/mean"] = Metric.mean(self.staleness_sum, self.num_trained)
        metrics["train/staleness/max"] = Metric("max", self.staleness_max)
        if self.num_generated:
            metrics["train/filtered_prompts_ratio"] = Metric.mean(self.fates["kept"], self.num_generated)
        if self.num_scored:
            metrics["critic/score_all/mean"] = Metric.mean(self.score_sum, self.num_scored)
        if self.num_played:
            metrics["environment/failures"] = Metric("sum", self.num_environment_failures)
            metrics["environment/cut_observations"] = Metric("sum", self.num_cut_observations)
        if self.num_predicted:
            metrics["train/predicted_mixed_ratio"] = Metric.mean(self.predicted_mixed, self.num_predicted)
        return metrics
