"""Choosing a token: filters against brute force, draws against their distribution, log-probs against log_softmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.rollout.counter_noise import sequence_key, uniform
from gspo.rollout.engine import SamplingParams
from gspo.rollout.token_sampling import RowSampling, choose, cutoff, draw


def _rows(*params: SamplingParams) -> RowSampling:
    return RowSampling.of(params)


def _params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=1, **options)


def _kept_by_brute_force(scores: list[float], top_k: int, top_p: float) -> set[int]:
    """Walk down the sorted tokens; ties with the last token kept stay too."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
    total, mass, lowest = sum(weights), 0.0, scores[order[0]]
    for token, weight in zip(order, weights):
        lowest = scores[token]
        mass += weight
        if mass >= top_p * total:
            break
    return {i for i, s in enumerate(scores) if s >= lowest}


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=12),
    top_k=st.integers(-1, 14),
    top_p=st.sampled_from([0.05, 0.313, 0.5, 0.777, 0.95, 1.0]),
)
def test_top_k_and_top_p_keep_what_brute_force_keeps(scores, top_k, top_p):
    rows = _rows(_params(top_k=top_k, top_p=top_p))
    if rows.top_k is None and rows.top_p is None:
        assert top_k <= 0 and top_p == 1.0
        return
    tensor = torch.tensor([scores])
    kept = set(torch.nonzero(tensor[0] >= cutoff(tensor, rows)[0]).flatten().tolist())
    assert kept == _kept_by_brute_force(scores, top_k, top_p)


def test_each_row_has_its_own_parameters():
    torch.manual_seed(0)
    logits = torch.randn(5, 40) * 3
    params = [
        _params(),
        _params(top_k=3),
        _params(top_p=0.4, temperature=2.0),
        _params(temperature=0.0),
        _params(top_k=5, top_p=0.6, temperature=0.5),
    ]
    rows = RowSampling.of(params)
    for number in torch.linspace(0, 0.999, 30, dtype=torch.float64):
        together = choose(logits, rows, number.expand(5))
        for i, p in enumerate(params):
            alone = choose(logits[i : i + 1], _rows(p), number.expand(1))
            assert together[0][i] == alone[0][0] and together[1][i] == alone[1][0]


@pytest.mark.parametrize(
    "params", [_params(), _params(temperature=0.6), _params(top_k=4), _params(top_p=0.7), _params(top_k=6, top_p=0.8)]
)
def test_draws_follow_the_filtered_distribution(params):
    logits = torch.tensor([[1.5, -0.5, 0.0, 2.0, 0.3, -3.0, 1.0, 0.9]])
    num_draws = 40_000
    uniforms = uniform(torch.tensor(sequence_key(3, 1, 4)), torch.arange(num_draws))
    token, log_prob = choose(logits.expand(num_draws, -1), _rows(params), uniforms)
    scores = logits[0] / params.temperature
    kept = _kept_by_brute_force(scores.tolist(), params.top_k, params.top_p)
    mask = torch.tensor([i in kept for i in range(8)])
    expected = scores.double().masked_fill(~mask, -math.inf).softmax(-1) * num_draws
    counts = torch.bincount(token, minlength=8).double()
    assert counts[~mask].sum() == 0
    chi_square = ((counts - expected)[mask] ** 2 / expected[mask]).sum()
    freedom = int(mask.sum()) - 1
    assert (chi_square - freedom) / math.sqrt(2 * freedom) < 4
    assert torch.allclose(log_prob, scores.log_softmax(-1)[token], atol=1e-6)


def test_log_prob_is_of_the_training_distribution_whatever_was_filtered():
    torch.manual_seed(1)
    logits = torch.randn(6, 3000) * 4
    uniforms = torch.rand(6, dtype=torch.float64)
    token, log_prob = choose(logits, _rows(_params(temperature=0.8, top_k=2, top_p=0.9)), uniforms)
    expected = (logits / 0.8).log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert log_prob.dtype == torch.float32
    assert torch.allclose(log_prob, expected, atol=2e-6)


@pytest.mark.parametrize("size", [1, 7, 511, 1024, 1025, 5000])
def test_draw_inverts_the_cumulative_sum(size):
    torch.manual_seed(size)
    weights = torch.rand(200, size).masked_fill(torch.rand(200, size) < 0.7, 0.0)
    weights[:, size // 2] += 0.01
    uniforms = torch.rand(200, dtype=torch.float64)
    got = draw(weights, uniforms)
    running = weights.double().cumsum(-1)
    before = running.gather(1, got[:, None])[:, 0] - weights.gather(1, got[:, None])[:, 0].double()
    target = uniforms * running[:, -1]
    assert (weights.gather(1, got[:, None]) > 0).all()
    assert (before <= target + 1e-9).all() and (target < running.gather(1, got[:, None])[:, 0] + 1e-9).all()


@pytest.mark.parametrize("size", [8, 3000])
@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_draw_never_picks_a_token_without_weight(size, number):
    weights = torch.zeros(3, size)
    weights[0, 0], weights[1, size - 1], weights[2, size // 3] = 1.0, 1e-30, 3.0
    weights[2, size // 2] = 1e-3
    got = draw(weights, torch.full((3,), number, dtype=torch.float64))
    assert got.tolist() == [0, size - 1, size // 3 if number == 0.0 else size // 2]


def test_a_block_whose_sums_round_differently_never_yields_a_token_without_weight():
    """Tiny weights after a large one vanish in a running sum but not in a block's: the draw lands past the last weight."""
    weights = torch.zeros(1, 3000)
    weights[0, 0], weights[0, 1:400] = 1.0, 2.0**-54
    for number in (1.0 - 2.0**-53, 1.0 - 2.0**-50):
        got = draw(weights, torch.tensor([number], dtype=torch.float64))
        assert weights[0, got] > 0


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=2, max_size=10),
    filters=st.lists(
        st.tuples(st.integers(-1, 11), st.sampled_from([0.05, 0.5, 0.95, 1.0])), min_size=2, max_size=4, unique=True
    ),
)
def test_rows_of_one_batch_keep_what_each_keeps_alone(scores, filters):
    """A row without top-k makes the whole batch sort its full width; the others are filtered as before."""
    rows = _rows(*(_params(top_k=k, top_p=p) for k, p in filters))
    if rows.top_k is None and rows.top_p is None:
        return
    tensor = torch.tensor([scores]).expand(len(filters), -1)
    lowest = cutoff(tensor, rows)
    for row, (top_k, top_p) in enumerate(filters):
        kept = set(torch.nonzero(tensor[row] >= lowest[row]).flatten().tolist())
        assert kept == _kept_by_brute_force(scores, top_k, top_p)


def test_what_no_row_uses_is_off_and_rows_that_agree_share_one_value():
    plain = _rows(_params(), _params())
    assert (plain.temperature, plain.greedy, plain.top_k, plain.top_p) == (None, None, None, None)
    assert (plain.max_top_k, plain.all_greedy, plain.any_top) == (0, False, False)
    same = _rows(*[_params(temperature=0.5, top_k=4, top_p=0.9, num_top=2)] * 3)
    assert (same.temperature.tolist(), same.top_k.tolist(), same.top_p.tolist()) == ([[0.5]], [[4]], [[0.9]])
    assert (same.max_top_k, same.any_top, same.greedy) == (4, True, None)


def test_greedy_rows_switch_their_filters_off_and_the_widest_top_k_counts_where_all_have_one():
    mixed = _rows(_params(temperature=0.0, top_k=3, top_p=0.5), _params(temperature=0.7, top_k=5, num_top=1))
    assert mixed.temperature.flatten().tolist() == pytest.approx([1.0, 0.7])
    assert (mixed.greedy.tolist(), mixed.top_k.tolist()) == ([[True], [False]], [[0], [5]])
    assert (mixed.top_p, mixed.max_top_k, mixed.all_greedy, mixed.any_top) == (None, 0, False, True)
    assert _rows(_params(top_k=3), _params(top_k=5, top_p=0.5)).max_top_k == 5
    assert _rows(_params(top_k=3), _params(top_k=-1, top_p=0.5)).max_top_k == 0
    assert _rows(_params(temperature=0.0), _params(temperature=0.0, top_k=2)).all_greedy


def test_greedy_rows_report_log_probs_at_temperature_one_and_need_no_draw():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 0.0]])
    token, log_prob = choose(logits, _rows(_params(temperature=0.0)), None)
    assert token.tolist() == [1, 0]
    assert torch.allclose(log_prob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])


def test_tokens_with_equal_scores_at_the_cut_are_kept_together():
    scores = torch.tensor([[1.0, 3.0, 1.0, 0.0, 3.0]])
    assert [cutoff(scores, _rows(_params(top_k=k))).item() for k in (1, 2, 3, 4, 5, 9)] == [
        3.0,
        3.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]


def test_a_draw_is_the_first_token_whose_running_sum_passes_the_number():
    weights = torch.tensor([[1.0, 0.0, 1.0, 2.0]])
    numbers = [0.0, 0.2499, 0.25, 0.4999, 0.5, 0.9999]
    assert [draw(weights, torch.tensor([x], dtype=torch.float64)).item() for x in numbers] == [0, 0, 2, 2, 3, 3]
    wide = torch.zeros(1, 3000)
    wide[0, [0, 511, 512, 2999]] = 1.0
    numbers = [0.0, 0.25, 0.5, 0.75, 0.9999]
    found = [draw(wide, torch.tensor([x], dtype=torch.float64)).item() for x in numbers]
    assert found == [0, 511, 512, 2999, 2999]
