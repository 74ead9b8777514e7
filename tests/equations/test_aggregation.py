"""The five aggregations on numbers small enough to check by eye."""

from __future__ import annotations

import pytest
import torch

from gspo.algo import aggregate, count_totals
from gspo.types import BatchTotals

NAN = float("nan")
LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, NAN], [NAN, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def test_totals_count_only_sequences_with_trained_tokens():
    assert count_totals(MASK) == BatchTotals(num_tokens=4.0, num_sequences=2.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16),
        ("seq-mean-token-sum", 16 / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", 16 / 2 / 8),
    ],
)
def test_modes_and_padding(mode, expected):
    loss = LOSS.clone().requires_grad_()
    value = aggregate(loss, MASK, count_totals(MASK), mode, norm_length=8)
    value.backward()
    assert value.item() == expected
    assert torch.equal(loss.grad[MASK == 0], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 32),
        ("token-sum", 16),
        ("seq-mean-token-sum", 16 / 4),
        ("seq-mean-token-mean", (2 + 10) / 4),
        ("seq-mean-token-sum-norm", 16 / 4 / 0.5),
    ],
)
def test_totals_decide_the_denominator_not_the_tensor(mode, expected):
    assert aggregate(LOSS, MASK, BatchTotals(32, 4), mode, norm_length=0.5).item() == expected


def test_a_branch_counts_its_tokens_and_no_sequence():
    """Rows: a rollout, a rollout without trained tokens, two branches of which one is empty."""
    mask = torch.tensor([[2, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]])
    is_rollout = torch.tensor([True, True, False, False])
    assert count_totals(mask, is_rollout) == BatchTotals(num_tokens=4.0, num_sequences=1.0)
    assert count_totals(mask) == BatchTotals(num_tokens=4.0, num_sequences=2.0)
    assert count_totals(torch.zeros(2, 3)) == BatchTotals(0.0, 0.0)


def test_messages():
    with pytest.raises(ValueError, match="norm_length"):
        aggregate(LOSS, MASK, count_totals(MASK), "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"loss_agg_mode='mean'.*token-mean"):
        aggregate(LOSS, MASK, count_totals(MASK), "mean")
