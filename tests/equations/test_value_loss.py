"""The value loss as numbers and gradients, and the share of the returns' variance that values explain."""

from __future__ import annotations

import pytest
import torch

from gspo.algo.aggregation import count_totals
from gspo.algo.value_loss import explained_variance, value_loss


def test_values_that_moved_less_than_the_clip_do_not_count_as_clipped():
    generator = torch.Generator().manual_seed(0)
    old, returns = (torch.randn(50, 40, generator=generator) for _ in range(2))
    values = old + 0.4 * (2 * torch.rand(50, 40, generator=generator) - 1)
    mask = torch.ones(50, 40)
    out = value_loss(values, old, returns, mask, 0.5, count_totals(mask))
    assert out.metrics["critic/vf_clipfrac"].result() == 0
    assert out.loss == 0.5 * ((values - returns) ** 2).mean()


def test_the_value_loss_is_its_formula_in_numbers_and_gradient():
    values = torch.tensor([[0.2, 0.9, -1.0], [0.5, 7.0, 7.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[0.0, 0.1, -1.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    returns = torch.tensor([[1.0, 0.0, 0.0], [0.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    out = value_loss(values, old, returns, mask, 0.5, count_totals(mask))
    # V, and V held within 0.5 of the old one: 0.2/0.2, 0.9/0.6, -1/-1, 0.5/0.5; the larger square counts.
    squares = [0.8**2, 0.9**2, 1.0, 0.5**2]
    assert out.loss.item() == pytest.approx(0.5 * sum(squares) / 4, rel=1e-12)
    out.loss.backward()
    wanted = torch.tensor([[-0.8, 0.9, -1.0], [0.5, 0.0, 0.0]], dtype=torch.float64) / 4
    assert torch.allclose(values.grad, wanted, rtol=1e-12)
    assert out.metrics["critic/vf_clipfrac"].result() == 0


def test_a_value_that_left_its_range_towards_the_return_has_no_gradient():
    values = torch.tensor([[0.9]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    out = value_loss(values, zero, one, torch.ones(1, 1), 0.5, count_totals(torch.ones(1, 1)))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 * 0.5**2)
    assert float(values.grad) == 0
    assert out.metrics["critic/vf_clipfrac"].result() == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_value_loss_of_two_parts_is_that_of_the_whole(seed):
    """Values that left their range on either side, rows of different length; every metric merges to the whole."""
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(4, 5, generator=generator) < 0.7).int()
    clip, totals = 0.3, count_totals(mask)
    total, clipped, predicted, count = 0.0, 0, 0.0, int(mask.sum())
    for v, o, r, m in zip(
        values.flatten().tolist(), old.flatten().tolist(), returns.flatten().tolist(), mask.flatten()
    ):
        held = min(max(v, o - clip), o + clip)
        if m:
            total += max((v - r) ** 2, (held - r) ** 2) / 2
            clipped += (held - r) ** 2 > (v - r) ** 2
            predicted += v
    spoilt = [torch.where(mask.bool(), each, torch.nan) for each in (values, old, returns)]
    whole = value_loss(*spoilt, mask, clip, totals)
    parts = [value_loss(*(each[rows] for each in (*spoilt, mask)), clip, totals) for rows in (slice(0, 1), slice(1, 4))]
    assert whole.loss.item() == pytest.approx(total / count) and 0 < clipped < count
    assert sum(part.loss for part in parts).item() == pytest.approx(total / count)
    for name, wanted in (
        ("critic/vf_loss", total / count),
        ("critic/vf_clipfrac", clipped / count),
        ("critic/vpred_mean", predicted / count),
    ):
        assert whole.metrics[name].result() == pytest.approx(wanted)
        assert parts[0].metrics[name].merge(parts[1].metrics[name]).result() == pytest.approx(wanted), name


def test_explained_variance():
    returns, mask = torch.tensor([[0.0, 1.0, 2.0, 50.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1)  # an offset leaves nothing unexplained
    assert explained_variance(torch.zeros(1, 4), returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0
    assert explained_variance(returns, returns, torch.tensor([[1, 0, 0, 0]])) == 0
    assert explained_variance(returns, returns, torch.zeros(1, 4)) == 0
    values, targets = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])  # residuals -1 and 2
    assert explained_variance(values, targets, torch.ones(1, 2)) == pytest.approx(1 - 2.25 / 4)
