"""The memory model: parts by hand, stages of a step, measured peaks, and under sharding."""

from __future__ import annotations

import dataclasses

import pytest

from gspo.config import load
from gspo.kernels.sizes import CHUNK_ELEMENTS, FUSED_CHUNK_ELEMENTS
from gspo.plan import constants
from gspo.plan.constants import DEVICES, in_float32
from gspo.plan.lengths import Lengths
from gspo.plan.memory import (
    CRITIC_UPDATE,
    GENERATION,
    UPDATE,
    Memory,
    ModelSize,
    colocated_memory,
    engine_memory,
    logits_bytes,
    most_slots,
    trainer_memory,
)
from gspo.plan.workload import Workload, workload_of
from tests.plan.conftest import ranks
from tests.plan.measured import BENCHMARKS

ACTIVATIONS = "activations of a micro-batch"
GRADIENTS = ("gradients", "gradients in CUDA graphs")


@pytest.fixture
def model(seven) -> ModelSize:
    return ModelSize.of(seven, 2)


@pytest.mark.parametrize(
    "bench", [b for b in BENCHMARKS if b.peak_gib], ids=lambda b: f"{b.model}-{b.prompts}-{b.peak_gib}"
)
def test_measured_peaks_are_reproduced_and_not_underrated(bench):
    assert 0.95 <= bench.predicted_peak_gib() / bench.peak_gib < 1.1


@pytest.mark.parametrize(
    ("budget", "checkpointing", "gradients"), [(16384, True, 4), (16384, False, 4 + 2), (300_000, False, 2)]
)
def test_one_rank_holds_14_bytes_per_parameter_and_its_gradients(model, h200, work, budget, checkpointing, gradients):
    work = dataclasses.replace(work, token_budget=budget)
    held = trainer_memory(model, h200, work, ranks(1, checkpointing=checkpointing)).held
    assert sum(held[n] for n in ("parameters", "float32 masters", "optimiser")) == 14 * model.parameters
    assert sum(held.get(n, 0) for n in GRADIENTS) == gradients * model.parameters
    eager = dataclasses.replace(work, compiled=False)
    held = trainer_memory(model, h200, eager, ranks(1, checkpointing=checkpointing)).held
    assert held["gradients"] == min(gradients, 4) * model.parameters
    eight = trainer_memory(model, h200, work, ranks(8, checkpointing=checkpointing)).held
    assert eight["gradients"] == 4 * model.parameters / 8


def test_a_mini_batch_is_one_forward_when_its_longest_responses_fit(work):
    tokens = 128 * (128 // 8 + 2047)  # 16 groups, each prompt once; nothing follows a last token
    for budget, layout, fits in ((tokens, "shared", True), (tokens - 1, "shared", False), (tokens, "packed", False)):
        asked = dataclasses.replace(work, token_budget=budget, layout=layout)
        assert asked.largest_forward(1, packed=True).is_only is fits, (budget, layout)
    for rows, fits in ((128, True), (127, False)):
        counted = dataclasses.replace(work, token_budget=1 << 30, micro_rows=rows)
        forward = counted.largest_forward(1, packed=True)
        assert forward.is_only is fits and forward.responses == rows
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz"
    assert workload_of(load(None, [micro, f"{dynamic}=false"]).config).micro_rows == 2
    assert workload_of(load(None, [f"{dynamic}=true"]).config).micro_rows is None


def test_responses_of_many_lengths_fill_the_budget_and_those_of_one_length_are_cut_evenly(work):
    assert work.largest_forward(1, packed=True).tokens == pytest.approx(16384)
    assert work.largest_forward(1, packed=False).tokens == 16384 // 2176 * 2176  # whole padded rows
    even = Workload(128, 8, 24.0, 24, Lengths(128.0, 128, 0.0), mini_batches=4)
    # 32 groups of 24 + 8 · 127 tokens need three micro-batches: the largest has 11 of them.
    assert even.largest_forward(1, packed=True).responses == 88
    assert even.largest_forward(1, packed=True).tokens == 11 * (24 + 8 * 127)
    # A group that is over the budget is divided: two responses of three in one micro-batch.
    long = Workload(1, 3, 10.0, 10, Lengths(90.0, 90, 0.0), token_budget=200)
    assert long.largest_forward(1, packed=True).responses == 2
    # A rank with half of a group has its whole prompt, and no rank less than one response.
    assert work.largest_forward(32, packed=True).tokens == 128 + 4 * 2047
    assert work.largest_forward(4096, packed=True).tokens == 128 + 2047


def test_every_micro_batch_of_a_real_batch_is_within_the_largest_forward():
    from gspo.training.batch.batching import collate, plan_micro_batches
    from gspo.types import Group, Prompt, Reward, Rollout

    def group(number: int) -> Group:
        rollout = Rollout((1,) * 30, (-1.0,) * 30, (1,) * 30, (0,) * 30, "length").with_reward(Reward(1.0))
        return Group(Prompt(str(number), (), (1,) * 12), (rollout,) * 4, number, 0)

    batch = collate([group(i) for i in range(16)])
    for budget in (40, 130, 200, 500, 5000):
        for layout in ("shared", "packed", "plain"):
            work = Workload(16, 4, 12.0, 12, Lengths(30.0, 30, 0.0), mini_batches=2, token_budget=budget, layout=layout)
            cut = plan_micro_batches(batch, 8, max_tokens=budget, max_rows=1, kind=layout)
            most = max(len(rows) for micros in cut for rows in micros)
            assert most == work.largest_forward(1, packed=True).responses, (budget, layout)


def test_compiled_layers_keep_less_unless_one_is_recomputed(model, h200, work):
    eager = dataclasses.replace(work, compiled=False)

    def kept(work, split):
        return trainer_memory(model, h200, work, split).held[ACTIVATIONS]

    beside = 16384 * model.other_kept
    one = ranks(1)
    assert kept(work, one) - beside == pytest.approx(constants.COMPILED_KEPT * (kept(eager, one) - beside))
    for split in (ranks(1, checkpointing=True), ranks(8)):
        assert kept(work, split) == kept(eager, split)


def test_a_cuda_graph_keeps_its_activations_in_every_stage(model, h200, work):
    captured = trainer_memory(model, h200, work, ranks(1))
    eager = trainer_memory(model, h200, dataclasses.replace(work, compiled=False), ranks(1))
    for stage, alive in ((UPDATE, True), (GENERATION, False)):
        assert ACTIVATIONS in captured.in_stage(stage)
        assert (ACTIVATIONS in eager.in_stage(stage)) is alive


def test_a_reference_is_one_more_model_unless_it_is_the_policy_without_adapters(model, h200, work):
    more = trainer_memory(model, h200, dataclasses.replace(work, reference=True), ranks(1))
    assert more.held["reference"] == 2 * model.parameters
    words = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.path=org/model"]
    lora, path = "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.ref.path=org/other"
    for more, counted in (([], True), ([lora], False), ([lora, path], True)):
        asked = workload_of(load(None, [*words, *more]).config)
        assert asked.reference
        assert ("reference" in trainer_memory(model, h200, asked, ranks(1)).held) is counted, more


def test_a_critic_trains_beside_what_the_policys_graphs_keep(model, h200, work):
    memory = trainer_memory(model, h200, dataclasses.replace(work, critic=True), ranks(1))
    assert memory.held["critic"] == 14 * model.parameters
    assert memory.peak_stage == CRITIC_UPDATE
    held = memory.at_peak
    assert {ACTIVATIONS, "activations of the critic", "gradients of the critic"} <= set(held)
    assert not {"gradients", "logits of a chunk"} & set(held)
    assert held["activations of the critic"] > held[ACTIVATIONS]  # its layers are not compiled


def test_one_rank_with_its_optimiser_in_host_memory_holds_12_bytes_per_parameter_less(model, h200, work):
    kept = trainer_memory(model, h200, work, ranks(1))
    moved = trainer_memory(model, h200, dataclasses.replace(work, offload=True), ranks(1))
    assert not {"float32 masters", "optimiser"} & set(moved.held)
    assert kept.total - moved.total == pytest.approx(12 * model.parameters) == moved.on_host
    words = ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"]
    assert workload_of(load(None, words).config).offload and not workload_of(load(None, []).config).offload


def test_adapters_alone_have_gradients_masters_and_moments(model, h200, work):
    eager = dataclasses.replace(work, compiled=False)
    held = trainer_memory(dataclasses.replace(model, trained=1000), h200, eager, ranks(1)).held
    assert held["parameters"] == 2 * model.parameters
    assert sum(held[n] for n in ("float32 masters", "optimiser", "gradients")) == (4 + 8 + 4) * 1000


def test_shards_divide_what_is_held_and_gather_two_layers(model, seven, h200, work):
    held = trainer_memory(model, h200, work, ranks(16, checkpointing=True)).held
    assert held["parameters"] + held["optimiser"] + held["gradients"] == pytest.approx(16 * seven.parameters / 16)
    assert held["gathered layers"] == 2 * (2 * seven.layer_parameters + 2 * seven.head_parameters)
    full = trainer_memory(model, h200, work, ranks(16)).held
    assert full[ACTIVATIONS] > 5 * held[ACTIVATIONS]


def test_the_cache_by_hand(model, h200, work):
    held = engine_memory(model, h200, work, tp=2, slots=100, slot_tokens=2176).held
    assert held["KV cache"] == 100 * 2176 * (2 * 28 * 4 * 128 * 2) / 2
    assert held["parameters"] == model.parameters
    longer = dataclasses.replace(work, max_model_len=4096)
    assert (work.slot_tokens, longer.slot_tokens) == (128 + 2048, 4096)


def test_logits_of_a_chunk_by_hand(shape, h200):
    fused, targets = FUSED_CHUNK_ELEMENTS // 10, 1e12
    assert logits_bytes(shape, h200, targets) == fused * 10 * (4 + 2) + 80 * 4
    wide = logits_bytes(shape, in_float32(h200), targets)
    assert wide == 4 * (CHUNK_ELEMENTS // 10) * 10 * 4 == logits_bytes(shape, DEVICES["cpu"], targets)
    assert logits_bytes(shape, h200, 7) == 7 * 10 * (4 + 2) + 80 * 4


def test_one_process_shares_its_weights_and_the_cache_of_another_is_freed_while_training():
    trainer = Memory({"parameters": 10.0, "gradients": 28.0}, {"gradients": (UPDATE,)})
    engine = Memory({"parameters": 10.0, "KV cache": 30.0, "prefill": 1.0}, {"prefill": (GENERATION,)})
    cpu, gpu = DEVICES["cpu"], DEVICES["h200"]
    for chip in (cpu, gpu):
        one = colocated_memory(trainer, engine, chip, one_process=True)
        assert one.stages == {GENERATION: 10 + 30 + 1, UPDATE: 10 + 30 + 28}
    assert colocated_memory(trainer, engine, cpu, one_process=False).total == 10 + 10 + 30 + 28
    freed = colocated_memory(trainer, engine, gpu, one_process=False)
    assert freed.stages[GENERATION] == 10 + 10 + 31 and freed.stages[UPDATE] == 10 + 10 + 28


def test_the_peak_is_that_of_the_stage_that_holds_most():
    memory = Memory({"a": 1.0, "b": 5.0, "c": 3.0}, {"b": (GENERATION,), "c": (UPDATE,)}, on_host=9.0)
    assert memory.stages == {GENERATION: 6.0, UPDATE: 4.0}
    assert memory.total == 6.0 and memory.peak_stage == GENERATION and memory.at_peak == {"a": 1.0, "b": 5.0}
    reserved = memory.with_reserve(DEVICES["h200"])
    assert reserved.total == pytest.approx((6.0 + constants.RESERVED) * constants.FRAGMENTATION)
    assert reserved.on_host == 9.0 and memory.with_reserve(DEVICES["cpu"]) is memory


def test_the_most_slots_that_fit():
    assert most_slots(lambda n: n <= 37, 100) == 37
    assert most_slots(lambda n: True, 100) == 100
    assert most_slots(lambda n: False, 100) == 0


def test_weights_in_4_bits_and_moments_in_8_are_counted(model, h200, work):
    keys = ["model.lora_rank=4", "model.load_in_4bit=true", "actor.optim.eight_bit=true"]
    from_keys = workload_of(load(None, keys).config)
    assert (from_keys.four_bit, from_keys.eight_bit) == (True, True)
    narrow = dataclasses.replace(work, four_bit=True, eight_bit=True)
    before, after = (trainer_memory(model, h200, w, ranks(1)).held for w in (work, narrow))
    layers = model.shape.layers * model.shape.layer_parameters
    assert before["parameters"] - after["parameters"] == pytest.approx(layers * (2 - 0.5625))
    assert after["optimiser"] == pytest.approx(before["optimiser"] * (1 + 4 / 256) / 4)
