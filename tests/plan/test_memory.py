"""Memory a device: by hand, against the memory plan of `gspo doctor`, and under sharding."""

from __future__ import annotations

import dataclasses

import pytest

from gspo.config import load
from gspo.models.shape import shape_of
from gspo.plan import constants
from gspo.plan.constants import DEVICES
from gspo.plan.measured import BENCHMARKS
from gspo.plan.memory import Memory, colocated_memory, engine_memory, most_slots, trainer_memory
from gspo.plan.workload import workload_of


@pytest.mark.parametrize(
    "bench",
    [b for b in BENCHMARKS if b.peak_gib],
    ids=lambda b: f"{b.model}-{b.prompts}-{b.peak_gib}",
)
def test_measured_peaks_are_reproduced_and_not_underrated(bench):
    assert 0.95 <= bench.predicted_peak_gib() / bench.peak_gib < 1.2


@pytest.mark.parametrize(
    ("budget", "checkpointing", "gradients"), [(16384, True, 4), (16384, False, 4 + 2), (300_000, False, 2)]
)
def test_one_rank_holds_14_bytes_a_parameter_and_its_gradients(
    seven, h200, work, budget, checkpointing, gradients
):
    work = dataclasses.replace(work, token_budget=budget)
    held = trainer_memory(seven, h200, work, ranks=1, shard=1, checkpointing=checkpointing).held
    static = sum(held[n] for n in ("parameters", "float32 masters", "optimiser", "gradients"))
    assert static == (2 + 4 + 8 + gradients) * seven.parameters
    eager = dataclasses.replace(work, compiled=False)
    held = trainer_memory(seven, h200, eager, ranks=1, shard=1, checkpointing=checkpointing).held
    assert held["gradients"] == min(gradients, 4) * seven.parameters
    ranks = trainer_memory(seven, h200, work, ranks=8, shard=8, checkpointing=checkpointing).held
    assert ranks["gradients"] == 4 * seven.parameters / 8


def test_a_mini_batch_is_one_micro_batch_when_its_longest_answers_fit(work):
    tokens = 128 * (128 // 8 + 2048)  # 16 groups, each prompt once
    for budget, layout, fits in (
        (tokens, "shared", True),
        (tokens - 1, "shared", False),
        (tokens, "packed", False),
    ):
        asked = dataclasses.replace(work, token_budget=budget, layout=layout)
        assert asked.is_one_micro_batch is fits, (budget, layout)
    for rows, fits in ((128, True), (127, False)):
        assert dataclasses.replace(work, token_budget=1 << 30, micro_rows=rows).is_one_micro_batch is fits
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz"
    assert workload_of(load(None, [micro, f"{dynamic}=false"]).config).micro_rows == 2
    assert workload_of(load(None, [f"{dynamic}=true"]).config).micro_rows is None


def test_compiled_layers_keep_less_unless_one_is_recomputed(seven, h200, work):
    name, eager = "activations of a micro-batch", dataclasses.replace(work, compiled=False)

    def kept(work, **how):
        return trainer_memory(
            seven, h200, work, **{"ranks": 1, "shard": 1, "checkpointing": False, **how}
        ).held[name]

    beside = 16384 * 3 * seven.hidden * 2
    assert kept(work) - beside == pytest.approx(constants.COMPILED_KEPT * (kept(eager) - beside))
    for how in ({"checkpointing": True}, {"ranks": 8, "shard": 8}):
        assert kept(work, **how) == kept(eager, **how)


def test_a_reference_is_one_more_model(seven, h200, work):
    with_reference = dataclasses.replace(work, reference=True)
    more = trainer_memory(seven, h200, with_reference, ranks=1, shard=1, checkpointing=False)
    assert more.held["reference"] == 2 * seven.parameters


def test_one_rank_with_its_optimiser_in_host_memory_holds_12_bytes_a_parameter_less(seven, h200, work):
    offloaded = dataclasses.replace(work, offload=True)
    kept = trainer_memory(seven, h200, work, ranks=1, shard=1, checkpointing=False)
    moved = trainer_memory(seven, h200, offloaded, ranks=1, shard=1, checkpointing=False)
    assert not {"float32 masters", "optimiser"} & set(moved.held)
    assert kept.total - moved.total == pytest.approx(12 * seven.parameters)
    words = ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"]
    assert workload_of(load(None, words).config).offload and not workload_of(load(None, []).config).offload


def test_shards_divide_what_is_held_and_gather_two_layers(seven, h200, work):
    held = trainer_memory(seven, h200, work, ranks=16, shard=16, checkpointing=True).held
    assert held["parameters"] + held["optimiser"] + held["gradients"] == pytest.approx(
        16 * seven.parameters / 16
    )
    assert held["gathered layers"] == 2 * (2 * seven.layer_parameters + 2 * seven.head)
    full = trainer_memory(seven, h200, work, ranks=16, shard=16, checkpointing=False).held
    assert full["activations of a micro-batch"] > 5 * held["activations of a micro-batch"]


def test_the_cache_by_hand(seven, h200, work):
    padded = dataclasses.replace(work, paged=False)
    held = engine_memory(seven, h200, padded, tp=2, slots=100).held
    assert held["KV cache"] == 100 * (128 + 2048) * (2 * 28 * 4 * 128 * 2) / 2
    assert held["parameters"] == seven.parameters
    paged = engine_memory(seven, h200, work, tp=2, slots=100).held
    assert paged["KV cache"] == pytest.approx(held["KV cache"] * (128 + 700) / (128 + 2048))


def test_it_agrees_with_the_memory_plan_of_the_doctor():
    import torch

    from gspo.checks.doctor.memory import plan_memory

    config = load(None, ["actor_rollout_ref.actor.use_kl_loss=true"]).config
    theirs = plan_memory(config, torch.device("cpu"), base=0, available=1 << 40, num_val=1).held
    shape, work, device = shape_of("embedded"), workload_of(config), DEVICES["cpu"]
    trainer = trainer_memory(shape, device, work, ranks=1, shard=1, checkpointing=False).held
    rows = min(work.slots, int(work.groups_at_once) * work.group)
    engine = engine_memory(shape, device, work, tp=1, slots=rows).held
    for name in ("parameters", "optimiser", "gradients", "reference"):
        assert trainer[name] == theirs[name], name
    assert engine["KV cache"] == theirs["KV cache"]
    assert trainer["logits of a chunk"] == pytest.approx(theirs["logits of a chunk"], rel=0.01)
    assert trainer["activations of a micro-batch"] == pytest.approx(
        theirs["activations of a micro-batch"], rel=0.05
    )


def test_one_process_shares_its_weights_and_a_paged_cache_of_another_sleeps():
    trainer = Memory(
        {
            "parameters": 10.0,
            "gradients": 5.0,
            "activations of a micro-batch": 20.0,
            "logits of a chunk": 1.0,
            "temporaries of a layer": 2.0,
        }
    )
    engine = Memory({"parameters": 10.0, "KV cache": 30.0})
    for paged in (False, True):
        assert colocated_memory(trainer, engine, one_process=True, paged=paged).total == 68
        for prefill, total in ((28.0, 68), (29.0, 69)):  # what training takes again, and one byte more
            busy = Memory({**engine.held, "prefill": prefill})
            assert colocated_memory(trainer, busy, one_process=True, paged=paged).total == total
    assert colocated_memory(trainer, engine, one_process=False, paged=False).total == 78
    assert colocated_memory(trainer, engine, one_process=False, paged=True).total == 10 + 10 + 30


def test_the_most_slots_that_fit():
    assert most_slots(lambda n: n <= 37, 100) == 37
    assert most_slots(lambda n: True, 100) == 100
    assert most_slots(lambda n: False, 100) == 0
