"""Training in shards on two or three ranks gives the weights of one process, within float32 rounding."""

from __future__ import annotations

import functools

import pytest
import torch

from gspo.metrics import Metrics
from gspo.training.parallel.ranks import merge_ranks
from tests.distributed.cases import CASES, PER_SEQUENCE
from tests.distributed.conftest import ON_FOUR, ON_THREE, ON_TWO

# Sums of float32 in another order, through three updates; bf16 has 8 bits.
TOLERANCE = {"low_precision": 0.05}


@functools.cache
def alone(name: str):
    torch.manual_seed(0)
    return CASES[name](False)


def on_ranks(launched, name: str):
    ranks = range(launched.launch.world)
    assert (launched.folder / f"{name}-0.pt").exists(), launched.problem()
    return [torch.load(launched.folder / f"{name}-{rank}.pt", weights_only=False) for rank in ranks]


def same_metrics(got: Metrics, want: Metrics, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, metric in want.items():
        if name == "actor/entropy":  # put together from all rows by the controller: see the runs
            continue
        assert got[name].result() == pytest.approx(metric.result(), rel=tolerance, abs=tolerance), name


def same(launched, name: str) -> None:
    want, found = alone(name), on_ranks(launched, name)
    tolerance = TOLERANCE.get(name, 2e-5)
    for key, value in want.items():
        if key.startswith("state master/"):  # shards are their own masters
            continue
        if key.startswith("metrics"):
            same_metrics(
                merge_ranks([numbers[key] for numbers in found[:: PER_SEQUENCE.get(name, 1)]]), value, tolerance
            )
            continue
        size = max(1.0, float(value.abs().max()))
        for numbers in found:
            assert float((numbers[key] - value).abs().max()) <= tolerance * size, key


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_compute_what_one_process_does(two, name):
    same(two, name)


@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks_compute_what_one_process_does(three, name):
    same(three, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_that_share_sequences_compute_what_one_process_does(four, name):
    same(four, name)


def test_the_cases_reach_the_code_they_are_for():
    clipped, plain = alone("clipped"), alone("shared_prompts")
    assert plain["metrics 0"]["actor/grad_norm"].result() > 0.05 * 2
    assert not torch.equal(clipped["weight model.norm.weight"], plain["weight model.norm.weight"])
    shuffled = alone("shuffled_mini_batches")
    assert not torch.equal(shuffled["weight model.norm.weight"], plain["weight model.norm.weight"])
    skipped = {name: alone(name)["metrics 0"]["actor/skipped_updates"].result() for name in CASES if "bad" in name}
    assert skipped == {"bad_numbers": 1.0, "bad_gradients": 1.0}
    assert "actor/nonfinite_loss" in alone("bad_numbers")["metrics 0"]
    assert "actor/nonfinite_gradient" in alone("bad_gradients")["metrics 0"]
    assert alone("reference_and_entropy")["metrics 1"]["actor/kl_loss"].result() > 0
    moved = alone("critic")["weight head.weight"]
    assert moved.abs().sum() > 0
