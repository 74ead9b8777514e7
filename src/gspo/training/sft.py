"""Supervised training: batches of examples for the policy's update, the loss of their answers, and held-out loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gspo.algo.aggregation import aggregate
from gspo.data.examples import Example
from gspo.kernels.ragged import padded
from gspo.metrics import Metric, Metrics
from gspo.training.roles import PolicyRole
from gspo.types import AdvantageBatch, LossInputs, LossOutput, TrainBatch


def example_batch(examples: Sequence[Example]) -> TrainBatch:
    """The examples as groups of one response each, whose tokens are all trained on."""
    answers = [e.answer_ids for e in examples]
    width = max(map(len, answers))
    return TrainBatch(
        prompt_ids=[e.prompt.token_ids for e in examples],
        response_ids=answers,
        mask=padded([(1,) * len(a) for a in answers], width),
        group_ids=torch.arange(len(answers)),
        scores=torch.zeros(len(answers), dtype=torch.float64),
        rollout_log_probs=torch.zeros(len(answers), width),
    )


def answer_batch(examples: Sequence[Example]) -> AdvantageBatch:
    """The examples as a batch for an update with `answer_loss`. What only reinforcement learning needs is 0."""
    batch = example_batch(examples)
    nothing = batch.rollout_log_probs
    return batch.with_old(nothing).with_advantages(nothing, nothing)


def answer_loss(x: LossInputs) -> LossOutput:
    """The mean negative log-prob of the answer tokens of a mini-batch."""
    loss = aggregate(-x.log_probs, x.mask, x.totals, "token-mean")
    return LossOutput(loss, {"train/loss": Metric("sum", loss.detach())})  # micro-batches and ranks add up


def held_out_loss(policy: PolicyRole, examples: Sequence[Example], batch_size: int) -> Metrics:
    """`val/loss`, the mean negative log-prob per answer token, and `val/perplexity`, its exponential."""
    total, count = 0.0, 0.0
    for start in range(0, len(examples), batch_size):
        batch = example_batch(examples[start : start + batch_size])
        log_probs, _ = policy.log_probs(batch)
        total -= float(torch.where(batch.mask.bool(), log_probs, 0.0).double().sum())
        count += float(batch.mask.sum())
    loss = total / max(count, 1.0)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"val/loss": Metric.mean(total, count), "val/perplexity": Metric("last", perplexity)}
