"""Loss, gradient and metrics do not depend on micro-batches, padding or row order; nothing gives NaN or inf."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.algo import Behaviour, LossSettings, count_totals, get_policy_loss
from gspo.metrics import Metrics, merge_metrics
from gspo.types import BatchTotals, LossInputs
from tests.equations.loss_reference import AGGREGATIONS, LOSSES, Case, random_case, spread_of

BEHAVIOURS = (
    None,
    Behaviour("token_mask", 1.2),
    Behaviour("token_truncate", 1.2),
    Behaviour("sequence_mask", 1.1),
    Behaviour("sequence_truncate", 1.1),
    Behaviour("token_mask", None),
)
NUM_ROWS = 7
SPLITS = ([1] * 7, [3, 4], [2, 2, 2, 1], [6, 1], [4, 0, 3])


def subset(case: Case, rows: list[int]) -> Case:
    return Case(*([column[i] for i in rows] for column in (case.new, case.old, case.adv, case.mu)))


def evaluate(loss, case: Case, options: LossSettings, totals: BatchTotals, width=None, fill=float("nan")):
    """(loss, gradient as ragged rows, metrics) of one micro-batch."""
    if not case.new:
        return 0.0, [], {}
    tensors = case.tensors(width, fill)
    mask = tensors["response_mask"]
    log_probs = tensors["log_probs"].requires_grad_()
    advantages = tensors["advantages"].unsqueeze(-1).expand(mask.shape)
    x = LossInputs(log_probs, tensors["old_log_probs"], advantages, mask, totals, tensors["rollout_log_probs"])
    out = get_policy_loss(loss)(x, options)
    (gradient,) = torch.autograd.grad(out.loss, log_probs)
    assert torch.equal(gradient[mask == 0], torch.zeros_like(gradient[mask == 0]))
    return out.loss.item(), [row[: len(new)].tolist() for row, new in zip(gradient, case.new)], out.metrics


def assert_same(actual, expected) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-15)
    for a, e in zip(actual[1], expected[1], strict=True):
        assert a == pytest.approx(e, rel=1e-12, abs=1e-15)
    assert set(actual[2]) == set(expected[2])
    for name, metric in expected[2].items():
        assert actual[2][name].result() == pytest.approx(metric.result(), rel=1e-12, abs=1e-15), name


def accumulate(loss, case: Case, options: LossSettings, totals: BatchTotals, sizes: list[int]):
    """The same through micro-batches: losses added, gradients concatenated, metrics merged."""
    total, gradient, metrics, start = 0.0, [], Metrics(), 0
    for size in sizes:
        part = evaluate(loss, subset(case, list(range(start, start + size))), options, totals)
        total, gradient, start = total + part[0], gradient + part[1], start + size
        merge_metrics(metrics, part[2])
    return total, gradient, metrics


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_split_padding_and_order(loss, behaviour):
    case = random_case(21, spread_of(loss), num_rows=NUM_ROWS)
    totals = count_totals(case.tensors()["response_mask"])
    order = [4, 0, 6, 3, 1, 5, 2]
    for aggregation in AGGREGATIONS:
        options = LossSettings(aggregation=aggregation, norm_length=13.0, behaviour=behaviour)
        whole = evaluate(loss, case, options, totals)
        assert math.isfinite(whole[0]) and whole[0] != 0.0
        for sizes in SPLITS:
            assert_same(accumulate(loss, case, options, totals, sizes), whole)
        for width, fill in itertools.product((6, 9, 64), (float("nan"), float("inf"), -7.0)):
            assert_same(evaluate(loss, case, options, totals, width, fill), whole)
        moved = evaluate(loss, subset(case, order), options, totals)
        restored = [moved[1][order.index(i)] for i in range(NUM_ROWS)]
        assert_same((moved[0], restored, moved[2]), whole)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss", ["vanilla", "dapo", "cispo", "sapo"])
def test_split_at_every_ratio_level(loss, level):
    case = random_case(22, 0.3, num_rows=NUM_ROWS)
    totals = count_totals(case.tensors()["response_mask"])
    options = LossSettings(level=level, clip_low=0.05, clip_high=0.05)
    whole = evaluate(loss, case, options, totals)
    for sizes in SPLITS:
        assert_same(accumulate(loss, case, options, totals, sizes), whole)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_per_token_advantages_split_and_ignore_padding(loss, fill):
    """Advantages that differ by token, as from a critic, with anything at all standing in the padding."""
    case = random_case(24, spread_of(loss), num_rows=NUM_ROWS)
    tensors = case.tensors(fill=fill)
    mask = tensors["response_mask"]
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    advantages[mask == 0] = fill
    totals = count_totals(mask)

    def part(rows: slice):
        log_probs = tensors["log_probs"][rows].clone().requires_grad_()
        out = get_policy_loss(loss)(
            LossInputs(log_probs, tensors["old_log_probs"][rows], advantages[rows], mask[rows], totals)
        )
        return out.loss.item(), torch.autograd.grad(out.loss, log_probs)[0].tolist(), out.metrics

    whole, first, second = part(slice(None)), part(slice(0, 3)), part(slice(3, None))
    assert math.isfinite(whole[0])
    metrics = merge_metrics(merge_metrics(Metrics(), first[2]), second[2])
    assert_same((first[0] + second[0], first[1] + second[1], metrics), whole)


@pytest.mark.parametrize("loss", LOSSES)
def test_untrained_tokens_in_the_middle_change_nothing(loss):
    """Masks are carried, not derived: a hole in the mask is as if the token were not there."""
    case = random_case(23, spread_of(loss), num_rows=NUM_ROWS, empty=False)
    tensors = case.tensors(fill=0.0)
    mask = tensors["response_mask"]
    totals = count_totals(mask)
    spaced = {}
    for name in ("log_probs", "old_log_probs", "response_mask"):
        wide = torch.full((NUM_ROWS, 2 * mask.shape[1]), 5.0, dtype=torch.float64)
        if name == "response_mask":
            wide.zero_()
        wide[:, 1::2] = tensors[name].double()
        spaced[name] = wide
    plain_x, wide_x = (
        LossInputs(
            source["log_probs"],
            source["old_log_probs"],
            tensors["advantages"].unsqueeze(-1).expand(source["response_mask"].shape),
            source["response_mask"],
            totals,
        )
        for source in (tensors, spaced)
    )
    plain, wide = get_policy_loss(loss)(plain_x), get_policy_loss(loss)(wide_x)
    assert wide.loss.item() == pytest.approx(plain.loss.item(), rel=1e-12)
    for name, metric in plain.metrics.items():
        assert wide.metrics[name].result() == pytest.approx(metric.result(), rel=1e-12), name


@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batches_average_their_loss(loss):
    """Merged over two mini-batches, `actor/pg_loss` is the mean of their losses, not the sum."""
    values, metrics = [], Metrics()
    for seed in (31, 32):
        case = random_case(seed, spread_of(loss), num_rows=NUM_ROWS)
        totals = count_totals(case.tensors()["response_mask"])
        part = accumulate(loss, case, LossSettings(), totals, [3, 4])
        values.append(part[0])
        merge_metrics(metrics, part[2])
    assert metrics["actor/pg_loss"].result() == pytest.approx(sum(values) / 2, rel=1e-12)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_trained_tokens_is_exactly_zero(loss, behaviour):
    case = Case([[], []], [[], []], [1.0, -1.0], [[], []])
    for aggregation in AGGREGATIONS:
        options = LossSettings(aggregation=aggregation, norm_length=3.0, behaviour=behaviour)
        value, _, metrics = evaluate(loss, case, options, BatchTotals(0, 0), width=3)
        assert value == 0.0
        assert all(not math.isnan(metric.result()) for metric in metrics.values())


log_probabilities = st.one_of(
    st.floats(-5, 0), st.sampled_from([0.0, -1e-8, -19.99, -20.0, -20.01, -80.0, -745.0, -1e4, -1e8])
)
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=5)
advantage_values = st.one_of(st.floats(-3, 3), st.sampled_from([0.0, 1e-12, -1e-12, 1e3, -1e3]))


@st.composite
def cases(draw) -> Case:
    sizes = draw(lengths)
    columns = [[draw(st.lists(log_probabilities, min_size=n, max_size=n)) for n in sizes] for _ in range(3)]
    return Case(columns[0], columns[1], [draw(advantage_values) for _ in sizes], columns[2])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), single=st.booleans(), aggregation=st.sampled_from(AGGREGATIONS))
def test_nothing_gives_nan_or_inf(case, single, aggregation):
    """Random lengths, empty masks, single tokens, log-ratios up to 1e8, in float32 and float64."""
    tensors = case.tensors()
    dtype = torch.float32 if single else torch.float64
    mask = tensors["response_mask"]
    totals = count_totals(mask)
    for loss, behaviour in itertools.product(LOSSES, (None, BEHAVIOURS[0], BEHAVIOURS[5])):
        log_probs = tensors["log_probs"].to(dtype).requires_grad_()
        x = LossInputs(
            log_probs,
            tensors["old_log_probs"].to(dtype),
            tensors["advantages"].to(dtype).unsqueeze(-1).expand(mask.shape),
            mask,
            totals,
            tensors["rollout_log_probs"].to(dtype),
        )
        options = LossSettings(aggregation=aggregation, norm_length=4.0, behaviour=behaviour)
        out = get_policy_loss(loss)(x, options)
        (gradient,) = torch.autograd.grad(out.loss, log_probs)
        assert out.loss.isfinite(), loss
        assert gradient.isfinite().all(), loss
        assert torch.equal(gradient[mask == 0], torch.zeros_like(gradient[mask == 0]))
        empty = mask.sum() == 0
        for name, metric in out.metrics.items():
            extreme_of_nothing = empty and metric.kind in ("min", "max")
            assert math.isfinite(metric.result()) or extreme_of_nothing, (loss, name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), loss=st.sampled_from(LOSSES), aggregation=st.sampled_from(AGGREGATIONS))
def test_random_splits_add_up(data, loss, aggregation):
    num_rows = data.draw(st.integers(2, 9))
    case = random_case(data.draw(st.integers(0, 999)), spread_of(loss), num_rows=num_rows)
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows - 1))))
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, num_rows])]
    totals = count_totals(case.tensors()["response_mask"])
    options = LossSettings(aggregation=aggregation, norm_length=7.0)
    assert_same(accumulate(loss, case, options, totals, sizes), evaluate(loss, case, options, totals))
