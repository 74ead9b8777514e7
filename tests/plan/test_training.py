"""Training: the measured points, products and communication by hand, and ranks without work."""

from __future__ import annotations

import dataclasses

import pytest

from gspo.models.shape import SHAPES
from gspo.plan.constants import (
    ATTENTION_SHARE,
    CAPTURED_SHARE,
    COLLECTIVE_SHARE,
    COMPILED_TRAIN_SHARE,
    HOP_S,
    OFFLOAD_COPY,
    TRAIN_SHARE,
    in_float32,
)
from gspo.plan.lengths import Lengths
from gspo.plan.split import is_captured, is_compiled
from gspo.plan.train_time import ATTENTION, EXCHANGE, LAUNCH, OPTIMIZER, PRODUCTS, UNEVEN, TrainCost
from gspo.plan.transfers import checkpoint_seconds, gather_seconds, publish_seconds, reduce_seconds
from gspo.plan.workload import Workload
from tests.plan.conftest import ranks
from tests.plan.measured import BENCHMARKS


@pytest.mark.parametrize(
    "bench", [b for b in BENCHMARKS if b.train_s], ids=lambda b: f"{b.model}-{b.prompts}-{b.train_s}"
)
def test_measured_training_is_reproduced_within_a_fifth(bench):
    assert 0.8 < bench.predicted_train_s() / bench.train_s < 1.2


def test_captured_training_launches_fewer_kernels(seven, h200, work):
    alone = TrainCost(seven, h200)
    launches = alone.update(dataclasses.replace(work, compiled=False))[LAUNCH]
    assert alone.update(work)[LAUNCH] == pytest.approx(CAPTURED_SHARE * launches)
    assert alone.score(work)[LAUNCH] < alone.reference(work)[LAUNCH]  # of which three quarters are scored


def test_only_one_rank_with_a_dense_packed_model_in_half_precision_is_captured(seven, h200, work):
    one = ranks(1)
    assert is_captured(seven, h200, work, one)
    again = ranks(1, checkpointing=True)
    assert is_compiled(seven, h200, work, again) and not is_captured(seven, h200, work, again)
    for shape, device, split in (
        (seven, h200, ranks(8)),
        (SHAPES["30b-a3b"], h200, one),
        (seven, in_float32(h200), one),
    ):
        assert not is_compiled(shape, device, work, split)
    for kept in ({"layout": "plain"}, {"compiled": False}):
        assert not is_compiled(seven, h200, dataclasses.replace(work, **kept), one)


def test_products_by_hand(shape, h200):
    work = Workload(2, 4, 10.0, 10, Lengths(20.0, 20, 0.0), layout="packed")
    tokens, pairs = 8 * 30, 8 * (10**2 / 2 + 10 * 20 + 20**2 / 2)
    forward = tokens * 2 * (2 * 656 + 8) / 790e12
    attention = 4 * 2 * 8 * pairs / 790e12 / ATTENTION_SHARE
    eager = dataclasses.replace(work, compiled=False)
    trainer = TrainCost(shape, h200)
    for passes, kind in ((3, trainer), (4, TrainCost(shape, h200, ranks(1, checkpointing=True)))):
        for share, asked in ((COMPILED_TRAIN_SHARE, work), (TRAIN_SHARE, eager)):
            update = kind.update(asked)
            assert update[PRODUCTS] == pytest.approx(passes * forward / share)
            assert update[ATTENTION] == pytest.approx(passes * attention)  # one kernel, compiled or not
    assert trainer.score(work)[PRODUCTS] == pytest.approx(forward / COMPILED_TRAIN_SHARE)
    assert trainer.reference(work)[PRODUCTS] == pytest.approx(forward / TRAIN_SHARE)


def test_an_optimiser_in_host_memory_takes_the_time_of_its_copies(seven, h200, work):
    away = dataclasses.replace(work, offload=True)
    steps = work.epochs * work.mini_batches
    there = 12 * seven.parameters / OFFLOAD_COPY
    assert TrainCost(seven, h200).update(away)[OPTIMIZER] == pytest.approx(steps * there)
    wide = TrainCost(seven, in_float32(h200)).update(away)[OPTIMIZER]
    assert wide == pytest.approx(steps * there * 8 / 12)  # a float32 parameter is its own master
    eight = TrainCost(seven, h200, ranks(8))
    assert eight.update(away)[OPTIMIZER] == eight.update(work)[OPTIMIZER]


def test_shared_prompts_are_computed_once():
    lengths = Lengths(20.0, 20, 0.0)
    tokens = {
        kind: Workload(2, 4, 10.0, 16, lengths, layout=kind).train_tokens for kind in ("shared", "packed", "plain")
    }
    assert tokens == {"shared": 2 * 10 + 8 * 20, "packed": 8 * 30, "plain": 8 * 36}


def test_twice_the_mini_batches_is_the_same_work(seven, h200, work):
    trainer = TrainCost(seven, h200)
    two, four = (trainer.update(dataclasses.replace(work, mini_batches=n)) for n in (2, 4))
    assert two[PRODUCTS] == pytest.approx(four[PRODUCTS])
    assert four["optimiser"] == pytest.approx(2 * two["optimiser"])


def test_ranks_share_the_work_until_there_is_no_response_left_for_them(seven, h200, work):
    few, many = (TrainCost(seven, h200, ranks(n)).update(work) for n in (8, 16))
    assert many[PRODUCTS] == pytest.approx(few[PRODUCTS] / 2)
    assert few.get(UNEVEN, 0) == 0
    alone = TrainCost(seven, h200, ranks(512, shard=8)).update(work)  # 128 responses per mini-batch, 512 ranks
    assert alone.largest == UNEVEN
    more = TrainCost(seven, h200, ranks(1024, shard=8)).update(work)
    assert more.total >= 0.95 * alone.total


def test_a_gather_by_hand(h200):
    inside = gather_seconds(h200, 8, 1e9)
    assert inside == pytest.approx(1e9 * 7 / 8 / (450e9 * COLLECTIVE_SHARE) + HOP_S)
    across = gather_seconds(h200, 16, 1e9)
    assert across == pytest.approx(1e9 * 15 / 16 / (400e9 * COLLECTIVE_SHARE) + 2 * HOP_S)
    assert gather_seconds(h200, 1, 1e9) == 0 and reduce_seconds(h200, 1, 1e9) == 0


def test_communication_takes_time_only_where_computation_does_not_hide_it(h200, work):
    large = SHAPES["72b"]
    tiny = dataclasses.replace(work, prompts=8, mini_batches=1)
    assert TrainCost(large, h200, ranks(64)).update(tiny).get(EXCHANGE, 0) > 0
    busy = dataclasses.replace(work, prompts=4096, mini_batches=1)
    assert TrainCost(large, h200, ranks(64)).update(busy).get(EXCHANGE, 0) == 0


def test_publication_and_checkpoint_by_hand(seven, h200):
    size = 2 * seven.parameters
    assert publish_seconds(seven, h200, 1, 1, separate=False) == 0
    assert publish_seconds(seven, h200, 1, 1, separate=True) == pytest.approx(2 * size / 20e9)
    assert checkpoint_seconds(seven, h200, 8) == pytest.approx(14 * seven.parameters / 2e9)
    assert checkpoint_seconds(seven, h200, 8 * 400) == pytest.approx(14 * seven.parameters / 100e9)
