"""The errors that end sampling. Each carries the counts of the step that it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo.sampling.step_counts import SamplingCounts


class SamplingError(Exception):
    """Sampling cannot give a batch; `report` has the counts of the step so far."""

    def __init__(self, message: str, report: SamplingCounts) -> None:
        super().__init__(message)
        self.report = report


class GenerationLimit(SamplingError, ValueError):
    """A step used `max_num_gen_batches` and `on_limit` is `raise`."""


class StarvedSampling(SamplingError):
    """A full pass over the data kept nothing, or the limit was reached with nothing to train on."""

    def __init__(self, message: str, report: SamplingCounts, reason: str) -> None:
        super().__init__(message, report)
        self.reason = reason


class RewardFailures(SamplingError):
    """More rewards failed than `max_failure_rate` allows."""


class DataExhausted(SamplingError):
    """Every epoch is done and fewer groups are left than a batch needs: the ordinary end of training by epochs.

    The `num_leftover` kept groups stay in the queue, so a run resumed with more epochs still trains on them.
    """

    def __init__(self, message: str, report: SamplingCounts, num_leftover: int) -> None:
        super().__init__(message, report)
        self.num_leftover = num_leftover


def generation_limit(report: SamplingCounts, limit: int) -> GenerationLimit:
    """The error of a step that reached `max_num_gen_batches`; its first sentences are verl's, word for word."""
    return GenerationLimit(
        f"num_gen_batches={report.num_gen_batches} >= max_num_gen_batches={limit}. Generated too many batches. "
        f"Please check if your data are too difficult. Seen: {report.seen()}; {report.num_needed} kept groups are needed. "
        f"Remedies: {_remedies(report.fates)}; raise filter_groups.max_num_gen_batches (<= 0 is unlimited) or "
        "data.gen_batch_size; or set filter_groups.on_limit=train_partial or keep_unfiltered to go on.",
        report,
    )


def starved(report: SamplingCounts, fates: Mapping[str, int], cause: str) -> StarvedSampling:
    """The error of a sampler that keeps nothing; `fates` counts the groups dropped since one was last kept."""
    reason = next(iter(fates)) if len(fates) == 1 else "no_mixed_groups"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(fates.items())) or "none judged"
    return StarvedSampling(
        f"sampling is starved ({reason}): {cause}, and no group carries a gradient. Dropped since a group was last kept: "
        f"{counts}. Remedies: {_remedies(fates)}; or set filter_groups.on_limit=keep_unfiltered to train on them anyway.",
        report,
        reason,
    )


def reward_failures(report: SamplingCounts, max_rate: float) -> RewardFailures:
    """The error of a step whose rewards failed too often."""
    return RewardFailures(
        f"{report.num_failed_rewards} of {report.num_rollouts} rewards of this step failed ({report.failure_rate:.0%}), "
        f"above reward.max_failure_rate={max_rate}. First failure: {report.first_failure}. "
        "Remedies: fix the reward function, raise reward.timeout, or raise reward.max_failure_rate.",
        report,
    )


def data_exhausted(report: SamplingCounts, num_leftover: int) -> DataExhausted:
    """The end of the last epoch."""
    return DataExhausted(
        f"the data is used up: {num_leftover} kept groups are left and a batch needs {report.num_needed}. "
        "Raise trainer.total_epochs to train longer.",
        report,
        num_leftover,
    )


def _remedies(fates: Mapping[str, int]) -> str:
    right, wrong = fates.get("all_right", 0), fates.get("all_wrong", 0)
    if right > 2 * wrong:
        return "use harder prompts, or raise rollout.n or rollout.temperature so that answers differ"
    if wrong > 2 * right:
        return "use easier prompts, warm-start with `gspo sft`, raise rollout.n, or raise data.max_response_length if answers are cut off"
    return (
        "raise rollout.n, use prompts of other difficulty, or check that filter_groups.metric can differ within a group"
    )
