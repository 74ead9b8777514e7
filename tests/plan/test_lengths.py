"""The distribution of lengths: its mean after the cut, its tail, and the rest of a response observed at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.plan.lengths import Lengths


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 0.9), st.integers(64, 32768), st.floats(0.2, 1.5))
def test_the_mean_after_the_cut_is_the_given_one(share, longest, spread):
    lengths = Lengths(share * longest, longest, spread)
    assert sum(width * lengths.survival(x) for x, width in lengths.grid) == pytest.approx(lengths.mean, rel=0.02)
    assert lengths.longest_of(1) == pytest.approx(lengths.mean, rel=0.02)
    assert lengths.mean <= lengths.longest_of(8) <= lengths.longest_of(64) <= longest


def test_quantiles_invert_the_survival():
    lengths = Lengths(700.0, 8192, 0.8)
    for share in (0.1, 0.5, 0.9):
        assert 1 - lengths.survival(lengths.quantile(share)) == pytest.approx(share, abs=1e-9)
    assert lengths.quantile(1.0) == 8192


def test_the_longest_of_a_group_against_draws():
    lengths, draw = Lengths(700.0, 2048, 0.8), random.Random(0)
    longest = [max(lengths.quantile(draw.random()) for _ in range(8)) for _ in range(4000)]
    assert lengths.longest_of(8) == pytest.approx(sum(longest) / len(longest), rel=0.02)


def test_the_rest_of_a_response_observed_at_random_against_draws():
    lengths, draw = Lengths(700.0, 2048, 0.8), random.Random(1)
    all_of = [lengths.quantile(draw.random()) for _ in range(40000)]
    met = draw.choices(all_of, weights=all_of, k=40000)  # a long response is observed more often
    left = [length * draw.random() for length in met]
    assert lengths.residual_mean == pytest.approx(sum(left) / len(left), rel=0.03)
    middle = min(range(len(lengths.grid)), key=lambda i: abs(lengths.grid[i][0] - 500))
    share = sum(x > lengths.grid[middle][0] for x in left) / len(left)
    assert lengths.residuals[middle] == pytest.approx(share, abs=0.02)


def test_responses_of_one_length_have_no_tail():
    lengths = Lengths(128.0, 128, 0.0)
    assert lengths.constant and lengths.longest_of(1000) == pytest.approx(128)
    assert lengths.residual_mean == pytest.approx(64, rel=1e-3)


@pytest.mark.parametrize("mean", [0.0, 129.0])
def test_a_mean_outside_the_lengths_is_refused(mean):
    with pytest.raises(ValueError, match="mean response"):
        Lengths(mean, 128, 0.5)
