"""The prompt ledger: the posterior, its closed form and the skip decision."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gspo.sampling.prompt_ledger import PromptLedger, mixed_probability


@pytest.mark.parametrize(("a", "b", "size"), [(1, 1, 8), (9, 1, 8), (0.5, 3.25, 2), (40, 2.5, 16), (1, 1, 1)])
def test_closed_form_equals_the_integral(a, b, size):
    p = (np.arange(200_000) + 0.5) / 200_000
    log_density = (a - 1) * np.log(p) + (b - 1) * np.log1p(-p)
    density = np.exp(log_density - log_density.max())
    expected = np.sum(density * (1 - p**size - (1 - p) ** size)) / np.sum(density)
    assert mixed_probability(a, b, size) == pytest.approx(expected, abs=2e-3 if min(a, b) < 1 else 1e-6)


def test_uniform_prior_in_closed_form():
    assert mixed_probability(1, 1, 8) == pytest.approx(1 - 2 / 9, rel=1e-12)


def test_large_counts_stay_in_range():
    assert 0 <= mixed_probability(1e9, 1.0, 8) < 1e-7
    assert mixed_probability(1e9, 1e9, 8) == pytest.approx(1 - 2 / 256, rel=1e-5)


def test_counts_are_discounted():
    ledger = PromptLedger(group_size=8, seed=0, discount=0.5)
    ledger.observe("a", 8, 0)
    ledger.observe("a", 2, 6)
    assert ledger.state_dict() == {"a": [0.5 * 8 + 2, 6.0]}
    assert ledger.predict("a") == mixed_probability(1 + 6, 1 + 6, 8)


def test_unseen_prompts_are_never_skipped():
    ledger = PromptLedger(group_size=8, seed=0)
    assert ledger.predict("new") is None
    assert ledger.submit_probability("new") == 1.0
    assert all(ledger.admits(1.0, draw) for draw in range(1000))


def test_submit_probability_is_clipped_at_both_ends():
    ledger = PromptLedger(group_size=8, seed=0, min_prob=0.1)
    ledger.observe("even", 4, 4)
    ledger.observe("right", 8, 0)
    for _ in range(30):
        ledger.observe("always", 8, 0)
    assert ledger.submit_probability("even") == 1.0
    assert ledger.submit_probability("right") == pytest.approx(2 * mixed_probability(9, 1, 8))
    assert 2 * (ledger.predict("always") or 0) < 0.25
    strict = PromptLedger(group_size=8, seed=0, min_prob=0.3)
    strict.load_state_dict(ledger.state_dict())
    assert strict.submit_probability("always") == 0.3


def test_decision_has_the_stated_frequency_and_depends_on_seed_and_draw_only():
    ledger = PromptLedger(group_size=8, seed=5)
    draws = [ledger.admits(0.3, d) for d in range(20_000)]
    assert abs(np.mean(draws) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 20_000)
    assert draws[::-1] == [PromptLedger(group_size=2, seed=5).admits(0.3, d) for d in reversed(range(20_000))]
    assert draws != [PromptLedger(group_size=8, seed=6).admits(0.3, d) for d in range(20_000)]


def test_state_round_trips_exactly():
    ledger = PromptLedger(group_size=8, seed=0, discount=0.7)
    for i in range(20):
        ledger.observe(f"p{i % 3}", i % 9, 8 - i % 9)
    other = PromptLedger(group_size=8, seed=0, discount=0.7)
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert other.state_dict() == ledger.state_dict()
