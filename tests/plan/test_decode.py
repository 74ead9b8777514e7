"""Generation: the measured points, one step by hand, and continuous batching against an event-by-event count."""

from __future__ import annotations

import heapq
import random

import pytest

from gspo.models.shape import SHAPES
from gspo.plan import constants
from gspo.plan.constants import in_float32
from gspo.plan.decode import CACHE, HEAD, LAUNCH, PREFILL, PRODUCTS, WEIGHTS, DecodeCost, generate, steady
from gspo.plan.lengths import Lengths
from tests.plan.measured import BENCHMARKS


@pytest.mark.parametrize(
    "bench",
    [b for b in BENCHMARKS if b.rollout_s and not b.eager],
    ids=lambda b: f"{b.model}-{b.prompts}-{b.rollout_s:.3f}",
)
def test_measured_rollouts_are_reproduced(bench):
    assert bench.predicted_rollout_s() == pytest.approx(bench.rollout_s, rel=0.15)


@pytest.mark.parametrize("bench", [b for b in BENCHMARKS if b.eager], ids=lambda b: b.model)
def test_eager_decoding_is_within_a_third_of_what_was_measured(bench):
    assert 0.67 < bench.predicted_rollout_s() / bench.rollout_s < 1.5


def test_a_step_by_hand(shape, h200):
    parts = DecodeCost(shape, h200).step(4, 100)
    rate = 0.85 * 4.8e12
    assert parts[LAUNCH] == pytest.approx(2 * constants.DECODE_LAYER_S)
    assert parts[WEIGHTS] == pytest.approx(2 * (2 * 656 + 8 + 80) / rate)
    kept = 2 * (4 * 16 + 6 * 8 + 2 * 8 + 2 * 8 + 2 * 8)
    row = (100 * 64 + constants.ROW_PASSES * 2 * kept) / rate + 2 * constants.ROW_LAYER_S
    assert parts[CACHE] == pytest.approx(4 * row)
    sampling = constants.SAMPLING_PASSES * 4 * 10 * 4 / rate
    assert parts[HEAD] == pytest.approx(2 * 4 * 80 / 790e12 + sampling)
    wide = DecodeCost(shape, in_float32(h200)).step(4, 100)
    assert wide[HEAD] == pytest.approx(2 * 4 * 80 / (67e12 * 0.8) + sampling)
    assert PRODUCTS not in parts


def test_a_large_batch_is_limited_by_products(seven, h200):
    large = DecodeCost(seven, h200).step(4096, 10)
    assert large[PRODUCTS] > large[LAUNCH] and WEIGHTS not in large
    assert DecodeCost(seven, h200).step(1, 10).largest == WEIGHTS
    assert DecodeCost(seven, h200).step(200, 30000).largest == CACHE


def test_responses_of_one_length_take_their_steps_in_waves(shape, h200):
    engine, lengths = DecodeCost(shape, h200), Lengths(100.0, 100, 0.0)
    one = generate(engine, 8, 1, 8, lengths, 16, 8)
    by_hand = sum(engine.step(8, 16 + x).total * width for x, width in lengths.grid)
    assert one.total - one[PREFILL] == pytest.approx(by_hand)
    assert by_hand == pytest.approx(100 * engine.step(8, 66).total, rel=1e-3)
    three = generate(engine, 24, 1, 8, lengths, 16, 8)
    assert three.total == pytest.approx(3 * one.total)


def brute_force(engine: DecodeCost, rows: int, slots: int, lengths: Lengths, prompt: float, seed: int) -> float:
    """Seconds of one engine that refills slots as responses end; a step's cost holds until the next response ends."""
    draw = random.Random(seed)
    waiting = [lengths.quantile(draw.random()) for _ in range(rows)]
    running = [waiting.pop() for _ in range(min(slots, rows))]
    heapq.heapify(running)
    done, seconds = 0.0, 0.0
    while running:
        end, busy = running[0], len(running)
        context = prompt + lengths.residual_mean
        seconds += (end - done) * engine.step(busy, context).total
        done = heapq.heappop(running)
        if waiting:
            heapq.heappush(running, done + waiting.pop())
    return seconds


@pytest.mark.parametrize(("rows", "slots"), [(256, 256), (2048, 128), (1024, 256)])
def test_continuous_batching_against_a_count_of_every_response(rows, slots, h200):
    engine, lengths = DecodeCost(SHAPES["1.5b"], h200), Lengths(700.0, 2048, 0.8)
    counted = [brute_force(engine, rows, slots, lengths, 128.0, seed) for seed in range(3)]
    parts = generate(engine, rows, 1, slots, lengths, 128.0, 8)
    assert parts.total - parts[PREFILL] == pytest.approx(sum(counted) / 3, rel=0.08)


def test_steady_work_has_no_tail_and_more_rows_give_more_tokens(seven, h200):
    lengths = Lengths(700.0, 2048, 0.8)
    engine = DecodeCost(seven, h200)
    speeds = [rows / steady(engine, rows, 128.0, lengths, 8).total for rows in (8, 32, 128, 512)]
    assert speeds == sorted(speeds)
    batch = generate(engine, 256, 1, 256, lengths, 128.0, 8)
    assert 256 * lengths.mean / batch.total < 256 / steady(engine, 256, 128.0, lengths, 8).total


def test_more_devices_per_engine_read_faster_and_pay_for_their_communication(seven, h200):
    one, four = DecodeCost(seven, h200).step(16, 500), DecodeCost(seven, h200, tp=4).step(16, 500)
    assert four[WEIGHTS] == pytest.approx(one[WEIGHTS] / 4)
    assert four["tensor-parallel communication"] > 0 and four.total < one.total


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_a_prompt_is_prefilled_once_for_its_group(seven, h200, spread):
    engine, lengths = DecodeCost(seven, h200), Lengths(60.0, 100, spread)
    for rows, slots in ((64, 64), (64, 16)):
        parts = generate(engine, rows, 1, slots, lengths, 500, 8)
        assert parts[PREFILL] == pytest.approx(engine.prefill_seconds(8, 500))
    assert engine.prefill_seconds(8, 500) == pytest.approx(8 * engine.prefill_seconds(1, 500))
    assert steady(engine, 60, 500, lengths, 8)[PREFILL] == pytest.approx(engine.prefill_seconds(1 / 8, 500))
