"""What a step leaves behind: the metrics of its batch."""

from __future__ import annotations

import pytest
import torch

from gspo.loop.step_records import TrainedStep, step_metrics
from gspo.sampling.step_counts import SamplingCounts
from gspo.training.batch.batching import collate
from gspo.training.policy import Update
from tests.training.test_policy import groups


def test_an_answer_the_policy_was_certain_of_counts_in_the_gap_to_the_rollouts():
    """A log-prob of exactly 0 is a value, not a sign that the row was not scored."""
    of = groups(num=1, n=2)
    batch = collate(of)
    old = torch.stack([torch.zeros_like(batch.mask[0]), batch.rollout_log_probs[1] + 0.5]) * batch.mask
    whole = batch.with_old(old).with_advantages(batch.mask, batch.mask)
    metrics = step_metrics(TrainedStep(of, SamplingCounts(0, 1, 1), Update({}, old, whole), {}))
    certain, other = (len(r) for r in batch.response_ids)
    wanted = -(1.0 * certain + 0.5 * other) / (certain + other)  # μ is -1 on every token
    assert metrics["actor/rollout_kl"].result() == pytest.approx(wanted)
    assert metrics["actor/rollout_ratio_seq/max"].result() == pytest.approx(torch.e)
