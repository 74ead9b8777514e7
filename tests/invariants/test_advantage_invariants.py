"""Advantages do not depend on row order, padding, group numbering or, for group baselines, a shift of rewards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.algo import compute_advantage

NAMES = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")


@st.composite
def batches(draw):
    num_rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    groups = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    scores = draw(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, -2.0]), min_size=num_rows, max_size=num_rows))
    sizes = draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows))
    rewards = torch.zeros(num_rows, width, dtype=torch.float64)
    mask = torch.zeros(num_rows, width)
    for i, (score, size) in enumerate(zip(scores, sizes)):
        rewards[i, max(size - 1, 0)] = score
        mask[i, :size] = 1
    values = torch.arange(num_rows * width, dtype=torch.float64).reshape(num_rows, width).sin()
    return rewards, mask, torch.tensor(groups), values


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), data=st.data(), name=st.sampled_from(NAMES))
def test_order_padding_and_numbering(batch, data, name):
    rewards, mask, groups, values = batch
    base = compute_advantage(name, rewards, mask, groups, values=values, gamma=0.9, lam=0.8)
    order = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    extra = data.draw(st.integers(0, 4))

    def change(tensor, fill=0.0):
        return torch.nn.functional.pad(tensor[order], (0, extra), value=fill)

    changed = compute_advantage(
        name,
        change(rewards),
        change(mask),
        [f"uid-{g}" for g in groups[order].tolist()],
        values=change(values, float("nan")),
        gamma=0.9,
        lam=0.8,
    )
    # Whitening divides by sqrt(var + 1e-8), so a difference in the last bit can grow by up to 1e4.
    for a, b in zip(base, changed):
        torch.testing.assert_close(change(a), b, rtol=1e-10, atol=1e-11)
        assert a.isfinite().all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batch=batches(), name=st.sampled_from(("grpo", "dr_grpo", "rloo", "opo")))
def test_flat_groups_are_exactly_zero_and_others_are_not(batch, name):
    rewards, _, groups, _ = batch
    full = torch.ones(rewards.shape)
    advantages, _ = compute_advantage(name, rewards, full, groups)
    for group in groups.unique():
        rows = groups == group
        scores = rewards[rows].sum(-1)
        if rows.sum() == 1:
            continue
        if scores.max() == scores.min():
            assert torch.equal(advantages[rows], torch.zeros_like(advantages[rows]))
        else:
            assert advantages[rows].abs().max() > 0.01
            assert advantages[rows][:, 0].sum().abs() < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_groups_match_a_few(name):
    """All groups at once give what each group gives alone; whitening estimators see the batch, so only finiteness."""
    num_groups, size = 10_000, 8
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(num_groups * size, 2, dtype=torch.float64, generator=generator)
    ids = torch.arange(num_groups).repeat(size)
    ones = torch.ones(rewards.shape)
    advantages, _ = compute_advantage(name, rewards, ones, ids, values=torch.zeros_like(rewards))
    assert advantages.isfinite().all()
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert advantages.mean().abs() < 1e-9
        assert advantages.std().item() == pytest.approx(1.0, rel=1e-6)
        return
    for group in (0, 4_321, num_groups - 1):
        rows = ids == group
        alone, _ = compute_advantage(name, rewards[rows], ones[rows], ids[rows])
        torch.testing.assert_close(advantages[rows], alone, rtol=1e-12, atol=1e-12)
