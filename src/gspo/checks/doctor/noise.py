"""The noise floor: how far two computations of the same log-probs differ, compared with the clip range.

A ratio compares log-probs. If a batch that is scored twice with the same weights already gives ratios outside 1 ± ε,
the clip acts on rounding errors instead of learning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.config import ResolvedLoss
from gspo.training.batch.batching import split_by_rows
from gspo.training.policy import TokenScorer
from gspo.types import TrainBatch

ALLOWED_SHARE = 0.01  # share of sequences (tokens) that noise alone may put outside the clip range
ALLOWED_SPREAD = 0.1  # standard deviation of the noise, relative to ε


@dataclass(frozen=True, slots=True)
class Noise:
    """Differences of log-probs between two scorings. Sequence values are means over the tokens of a sequence."""

    between: str
    token_rms: float
    token_max: float
    sequence_rms: float
    sequence_max: float
    outside: float  # share of sequences (tokens for a token ratio) outside the clip range


def measure_noise(scorer: TokenScorer, batch: TrainBatch, objective: ResolvedLoss) -> list[Noise]:
    """Compare the scoring of training with that of single responses, and with the log-probs of the engine."""
    trained, _ = scorer.log_probs(batch)
    rows = list(range(batch.num_sequences))
    alone, _ = scorer.log_probs(batch, [split_by_rows(rows, 1)])
    return [
        compare("another micro-batch shape", alone, trained, batch.mask, objective),
        compare("engine and trainer", batch.rollout_log_probs, trained, batch.mask, objective),
    ]


def compare(between: str, one: Tensor, other: Tensor, mask: Tensor, objective: ResolvedLoss) -> Noise:
    """The spread of log-ratios, which would all be 0 without rounding."""
    kept = mask.bool()
    by_token = torch.where(kept, (one - other).double(), 0.0)
    by_sequence = by_token.sum(-1) / kept.sum(-1).clamp(min=1)
    values = by_sequence if objective.is_sequence_level else by_token[kept]
    ratio = values.exp()
    outside = (ratio < 1 - objective.clip[0]) | (ratio > 1 + objective.clip[1])
    return Noise(
        between,
        token_rms=float(by_token[kept].square().mean().sqrt()),
        token_max=float(by_token.abs().max()),
        sequence_rms=float(by_sequence.square().mean().sqrt()),
        sequence_max=float(by_sequence.abs().max()),
        outside=float(outside.double().mean()),
    )


def noise_problems(noises: list[Noise], objective: ResolvedLoss, dtype: str, source: str) -> list[str]:
    """Problems with their remedies; none when the noise is far below the clip range."""
    if not objective.clips:
        return []
    epsilon = min(objective.clip)
    problems = []
    for noise in noises:
        spread = noise.sequence_rms if objective.is_sequence_level else noise.token_rms
        if noise.outside <= ALLOWED_SHARE and spread <= ALLOWED_SPREAD * epsilon:
            continue
        unit = "sequences" if objective.is_sequence_level else "tokens"
        problems.append(
            f"noise floor ({noise.between}): in {dtype} rounding alone spreads log-ratios by {spread:.1e} and puts "
            f"{noise.outside:.0%} of the {unit} outside the clip range, ε = {epsilon:g}; {_remedy(noise, source)}"
        )
    return problems


def _remedy(noise: Noise, source: str) -> str:
    if noise.between.startswith("engine") and source == "rollout":
        return "set actor.old_log_prob_source=first_pass, or model.dtype=float32"
    advice = (
        "keep actor.old_log_prob_source at first_pass or recompute, which compare the trainer with itself; with rollout, "
        "noise would be clipped"
        if noise.between.startswith("engine")
        else "ratios stay exact as long as π_old is scored in the same micro-batches as the update, as it is by default; in "
        "any other layout noise is clipped"
    )
    return f"{advice}. model.dtype=float32 removes the noise, a wider clip range (actor.clip_target) covers it"
