"""The records of a step: its metrics, and what training adds to each group's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.build.parts import RunParts
from gspo.evaluation.evaluator import Evaluation
from gspo.loop.counters import Counters
from gspo.metrics import Metric, Metrics, merge_metrics
from gspo.runs.folder import RunFolder
from gspo.runs.group_log import GroupLog, write_records
from gspo.runs.turn_metrics import turn_metrics
from gspo.sampling.step_counts import SamplingCounts
from gspo.training.policy import Update
from gspo.types import Group, ScoredBatch


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Groups that were trained on, the update with their batch, and metrics of the other roles."""

    groups: list[Group]
    sampling: SamplingCounts
    update: Update
    extra: Metrics

    def tokens(self) -> set[int]:
        """Every token that occurs in its responses."""
        return {token for group in self.groups for rollout in group.rollouts for token in rollout.token_ids}


def measure(done: TrainedStep, parts: RunParts, counters: Counters) -> Metrics:
    """All metrics of a step whose weights are live. Controllers adapt to them, and tokens are counted."""
    with_gap = parts.config.actor_rollout_ref.rollout.calculate_log_probs
    metrics = step_metrics(done, with_gap=with_gap)
    merge_metrics(metrics, parts.objective.observe(done.update.metrics))
    merge_metrics(metrics, parts.engine.metrics())
    merge_metrics(metrics, parts.objective.teacher_metrics(done.update.batch))
    if parts.kl_reward is not None:
        merge_metrics(metrics, parts.kl_reward.observe())
    if parts.mixed is not None:
        merge_metrics(metrics, parts.mixed.observe())
    merge_metrics(metrics, counters.count_tokens(metrics))
    return metrics


def step_metrics(done: TrainedStep, *, with_gap: bool = True) -> Metrics:
    """Metrics of the update, of its batch (rewards, advantages, lengths) and of the sampler.

    `with_gap` adds how far the trainer's log-probs are from the engine's.
    """
    groups, batch, sampling = done.groups, done.update.batch, done.sampling
    rewards = [r.reward for g in groups for r in g.rollouts if r.reward is not None]
    trained = batch.mask.bool()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([float(rollout.num_model_tokens) for rollout in rollouts])
    metrics = sampling.metrics()
    for name, values in {
        "critic/score": torch.tensor([r.score for r in rewards], dtype=torch.float64),
        "critic/rewards": batch.scores[: batch.num_rollouts],
        "critic/advantages": batch.advantages[trained],
        "critic/returns": batch.returns[trained],
        "response_length": lengths,
        "prompt_length": torch.tensor([float(len(p)) for p in batch.prompt_ids]),
    }.items():
        metrics |= _spread(name, values)
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts)
    metrics["response_length/clip_ratio"] = Metric.mean(cut, batch.num_rollouts)
    for key in sorted({key for r in rewards for key in r.extra}):
        values = [r.extra[key] for r in rewards if key in r.extra]
        metrics[f"reward/{key}/mean"] = Metric.mean(sum(values), len(values))
    metrics |= turn_metrics(rollouts)
    if with_gap:
        metrics |= _rollout_gap(batch)
    merge_metrics(metrics, done.extra | done.update.metrics)
    return metrics


def warn_of_failures(step: int, sampling: SamplingCounts, warn: Callable[[str], None]) -> None:
    """Warn of missing rewards, if any."""
    if sampling.num_failed_rewards:
        warn(
            f"step {step}: {sampling.num_failed_rewards} of {sampling.num_rollouts} rewards failed and are "
            f"missing; the first: {sampling.first_failure}"
        )


def _spread(name: str, values: Tensor) -> Metrics:
    """Mean and extremes of the values; none of them without a value."""
    if not values.numel():
        return {}
    return {
        f"{name}/mean": Metric.mean(float(values.sum()), values.numel()),
        f"{name}/max": Metric("max", float(values.max())),
        f"{name}/min": Metric("min", float(values.min())),
    }


def _rollout_gap(batch: ScoredBatch) -> Metrics:
    """How far π_old is from μ, which wrote the answers: noise when they are fresh, the policy's movement when stale.

    `actor/rollout_kl` is the mean of log μ - log π_old; the plain ratios π_old/μ are given by token and by sequence.
    """
    trained = batch.mask.bool()
    log_ratio = torch.where(trained, batch.old_log_probs - batch.rollout_log_probs, 0.0).double()
    lengths = trained.sum(-1)
    by_sequence = (log_ratio.sum(-1) / lengths.clamp(min=1))[lengths > 0]
    return {
        "actor/rollout_kl": Metric.mean(float(-log_ratio.sum()), float(trained.sum())),
        **({} if not len(by_sequence) else _spread("actor/rollout_ratio_token", log_ratio[trained].exp())),
        **({} if not len(by_sequence) else _spread("actor/rollout_ratio_seq", by_sequence.exp())),
    }


def speed(values: Mapping[str, float], *, overlapped: bool) -> dict[str, float]:
    """`perf/throughput`: tokens of the groups that ended in a step, over its whole time; `perf/rollout_throughput`: over
    the time of its stage `gen`, unless generation is `overlapped` with training, where that stage only waits.

    Supervised training counts the tokens of its examples, over the time without evaluations.
    """
    tokens, step, gen = (values.get(name) for name in ("train/generated_tokens", "timing_s/step", "timing_s/gen"))
    if tokens is None:
        tokens, step = values.get("train/tokens"), (step or 0.0) - values.get("timing_s/testing", 0.0)
    if tokens is None or not step:
        return {}
    found = {"perf/throughput": tokens / step}
    return found | ({"perf/rollout_throughput": tokens / gen} if gen and not overlapped else {})


def row_weights(groups: Sequence[Group], weights: Sequence[float] | None) -> Tensor | None:
    """Weights of groups spread over their rows."""
    if weights is None:
        return None
    return torch.tensor([w for g, w in zip(groups, weights) for _ in g.rollouts], dtype=torch.float64)


def trained_details(
    groups: Sequence[Group], update: Update, token_text: Callable[[int], str]
) -> dict[int, list[dict[str, Any]]]:
    """By submission number, what training knows of each response: advantage, sequence ratio, tokens, log-probs."""
    batch, log_probs, mask = update.batch, update.log_probs, update.batch.mask
    counts = mask.sum(-1).clamp(min=1)
    ratios = torch.exp(((log_probs - batch.old_log_probs) * mask).sum(-1) / counts).tolist()
    advantages = (batch.advantages * mask).sum(-1) / counts
    rounded = {name: (t * 1e5).round().div(1e5).tolist() for name, t in _by_token(update).items()}
    out: dict[int, list[dict[str, Any]]] = {}
    row = 0
    for group in groups:
        details = out.setdefault(group.submission, [])
        for rollout in group.rollouts:
            size = len(rollout.token_ids)
            details.append(
                {
                    "advantage": float(advantages[row]),
                    "ratio": ratios[row],
                    "token_ids": list(rollout.token_ids),
                    "tokens": [token_text(t) for t in rollout.token_ids],
                    "loss_mask": list(rollout.loss_mask),
                    **{name: values[row][:size] for name, values in rounded.items()},
                }
            )
            row += 1
    return out


def _by_token(update: Update) -> dict[str, Tensor]:
    return {
        "log_probs": update.batch.rollout_log_probs.double(),
        "old_log_probs": update.batch.old_log_probs.double(),
        "new_log_probs": update.log_probs.double(),
    }


def write_groups(
    log: GroupLog,
    step: int,
    done: TrainedStep,
    texts: Mapping[int, str],
    judged: list[tuple[Group, str]],
    beat: Callable[[], None],
) -> None:
    """Write the groups that were judged in a step; those of its batch with their training details."""
    log.write(step, trained_details(done.groups, done.update, texts.__getitem__), judged)
    beat()


def evaluation_file(run: RunFolder, step: int) -> Path:
    """Where the evaluation of a step is kept."""
    return run.evals / f"step-{step:06d}.jsonl.gz"


def write_evaluation(run: RunFolder, step: int, evaluation: Evaluation) -> None:
    """Write one line per held-out question, compressed, under `evals/`."""
    write_records(run.evals, step, list(evaluation.records()), held_out=True)
