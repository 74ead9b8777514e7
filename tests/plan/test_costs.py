"""Costs of a plan worked out by hand: work from keys, splits, lengths, bytes held, transfers and intervals."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
from typing import Any

import pytest

from gspo.config import TrainerConfig, load
from gspo.config.loading import tree
from gspo.models.shape import SHAPES
from gspo.plan import constants
from gspo.plan.constants import DEVICES, Chip, in_float32
from gspo.plan.decode import EXCHANGE, HEAD, LAUNCH, WEIGHTS, DecodeCost, again, generate, steady
from gspo.plan.lengths import Lengths
from gspo.plan.memory import ModelSize, engine_memory, parameter_bytes, trainer_memory
from gspo.plan.predict import predict, shard_sizes, tensor_parallel, trainer_counts
from gspo.plan.seconds_by_part import SecondsByPart
from gspo.plan.split import Split, is_offloaded
from gspo.plan.train_time import TrainCost
from gspo.plan.transfers import (
    checkpoint_bytes,
    daly_interval,
    machines,
    publish_seconds,
    reduce_seconds,
    useful_share,
    young_interval,
)
from gspo.plan.workload import LargestForward, Workload, workload_of

A, R, M, F = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "algorithm.filter_groups",
)
TRAIN, MINI, GEN = "data.train_batch_size", f"{A}.ppo_mini_batch_size", "data.gen_batch_size"


@functools.cache
def _plain() -> TrainerConfig:
    return load(None, [f"{M}.path=org/model"]).config


def config(values: dict[str, Any]) -> TrainerConfig:
    found = copy.deepcopy(_plain())
    for key, value in values.items():
        tree.put(found, key, value)
    return found


def test_every_key_of_a_step_reaches_the_work() -> None:
    work = workload_of(
        config(
            {
                TRAIN: 12,
                MINI: 4,
                GEN: 20,
                f"{A}.ppo_epochs": 2,
                f"{R}.n": 5,
                "data.max_prompt_length": 70,
                "data.max_response_length": 90,
                f"{F}.enable": True,
                f"{F}.strategy": "stream",
                f"{F}.max_staleness": 2,
                f"{A}.old_log_prob_source": "first_pass",
                f"{A}.use_kl_loss": True,
                "algorithm.adv_estimator": "gae",
                f"{A}.ppo_max_token_len_per_gpu": 999,
                f"{R}.max_num_batched_tokens": 888,
                f"{R}.max_num_seqs": 77,
                f"{R}.max_model_len": 200,
                f"{R}.keep_cache": True,
                f"{M}.enable_gradient_checkpointing": True,
                f"{R}.enforce_eager": True,
                f"{A}.fsdp_config.reshard_after_forward": False,
                f"{A}.fsdp_config.optimizer_offload": True,
                f"{M}.use_shared_prefix": False,
            }
        ),
        mean_response=30.0,
        spread=0.5,
        keep_rate=0.25,
    )
    assert work == Workload(
        prompts=12,
        group_size=5,
        mean_prompt=70,
        longest_prompt=70,
        lengths=Lengths(30.0, 90, 0.5),
        mini_batches=3,
        epochs=2,
        keep_rate=0.25,
        eta=0,
        max_staleness=2,
        in_flight=20,
        fills_slots=True,
        keeps_cache=True,
        round_groups=None,
        layout="packed",
        score_share=1 - 1 / 3,
        reference=True,
        shares_reference=False,
        critic=True,
        token_budget=999,
        micro_rows=None,
        prefill_tokens=888,
        slots=77,
        max_model_len=200,
        checkpointing=True,
        eager=True,
        reshard=False,
        compiled=True,
        offload=True,
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"layout": "shared", "eta": 0, "keep_rate": 1.0, "checkpointing": None, "compiled": True, "in_flight": 12}),
        ({f"{M}.use_shared_prefix": False, f"{M}.use_remove_padding": False}, {"layout": "plain"}),
        ({f"{A}.use_dynamic_bsz": False, f"{A}.ppo_micro_batch_size_per_gpu": 3}, {"micro_rows": 3, "token_budget": 3 * 160}),
        ({f"{A}.use_torch_compile": False}, {"compiled": False}),
        ({f"{M}.lora_rank": 2}, {"compiled": False, "shares_reference": True}),
        ({f"{M}.lora_rank": 2, "actor_rollout_ref.ref.path": "x"}, {"shares_reference": False}),
        ({"trainer.deterministic": True}, {"compiled": False}),
        ({f"{R}.mode": "async", f"{R}.max_head_offpolicyness": 3}, {"eta": 3}),
        ({f"{R}.max_head_offpolicyness": 3}, {"eta": 0}),
        ({f"{F}.enable": True, f"{F}.strategy": "rounds", GEN: 20, f"{F}.max_staleness": 2}, {"round_groups": 20, "in_flight": None, "max_staleness": 0}),
        ({f"{F}.strategy": "rounds", GEN: 20}, {"round_groups": None}),
        ({f"{F}.enable": True, f"{F}.max_staleness": 1, GEN: 30}, {"in_flight": 24, "max_staleness": 1}),
        ({f"{F}.enable": True, f"{F}.max_staleness": 0, GEN: 30}, {"in_flight": 12}),
        ({f"{F}.enable": True, f"{F}.max_staleness": 2, f"{F}.max_in_flight": 7}, {"in_flight": 7}),
        ({f"{F}.enable": False, f"{F}.max_staleness": 2}, {"max_staleness": 0}),
        ({f"{A}.optim.eight_bit": True, f"{M}.load_in_4bit": True}, {"eight_bit": True, "four_bit": True}),
    ],
)  # fmt: skip
def test_single_keys_of_the_work(values: dict[str, Any], expected: dict[str, Any]) -> None:
    sized = {TRAIN: 12, MINI: 4, "data.max_prompt_length": 70, "data.max_response_length": 90}
    work = workload_of(config({**sized, **values}))
    assert {name: getattr(work, name) for name in expected} == expected


def work(**values: Any) -> Workload:
    return Workload(
        **{
            "prompts": 6,
            "group_size": 4,
            "mean_prompt": 10.0,
            "longest_prompt": 12,
            "lengths": Lengths(20.0, 20, 0.0),
            **values,
        }
    )


def test_rounds_and_groups_at_once() -> None:
    assert work().rounds == [6.0] and work(keep_rate=0.5).rounds == [6.0, 3.0, 1.5, 0.75]
    assert work(keep_rate=0.75).rounds == [6.0, 1.5] and len(work(keep_rate=0.001).rounds) == 64
    assert work(round_groups=4).rounds == [4.0, 4.0] and work(round_groups=6).rounds == [6.0]
    assert work(round_groups=4, keep_rate=0.5).rounds == [4.0] * 3
    assert (work(eta=2, in_flight=3).groups_at_once, work(in_flight=3).groups_at_once, work().groups_at_once) == (
        12.0,
        3.0,
        6.0,
    )
    assert work(keep_rate=0.5).generated_groups == 12.0


def test_tokens_pairs_and_targets_of_a_batch() -> None:
    assert (work().rows, work().longest, work().slot_tokens, work(max_model_len=99).slot_tokens) == (24, 32, 32, 99)
    for layout, tokens, pairs, targets in (
        ("shared", 6 * 10 + 24 * 20, 6 * 50 + 24 * (200 + 200), 480),
        ("packed", 24 * 30, 24 * (50 + 200 + 200), 480),
        ("plain", 24 * 32, 24 * 32**2 / 2, 480),
    ):
        found = work(layout=layout)
        assert (found.train_tokens, found.targets) == (tokens, targets)
        assert found.train_pairs == pytest.approx(pairs, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "ranks", "packed", "forward"),
    [
        ({}, 1, True, LargestForward(24, 6 * 12 + 24 * 19, True)),
        ({"mini_batches": 2}, 3, True, LargestForward(4, 12 + 4 * 19, True)),
        ({"mini_batches": 2}, 5, True, LargestForward(3, 12 + 3 * 19, True)),
        ({}, 1, False, LargestForward(24, 24 * 32, True)),
        ({"token_budget": 100}, 1, False, LargestForward(3, 96, False)),
        ({"token_budget": 20}, 1, False, LargestForward(1, 32, False)),
        ({"micro_rows": 5, "token_budget": 9}, 1, True, LargestForward(5, 2 * 12 + 5 * 19, False)),
        ({"token_budget": 264}, 1, True, LargestForward(12, 3 * 12 + 12 * 19, False)),
        ({"token_budget": 263}, 1, True, LargestForward(8, 2 * 12 + 8 * 19, False)),
        ({"token_budget": 60}, 1, True, LargestForward(2, 12 + 2 * 19, False)),
        ({"token_budget": 100, "layout": "packed"}, 1, True, LargestForward(3, 3 * 31, False)),
    ],
)
def test_the_largest_forward(values: dict[str, Any], ranks: int, packed: bool, forward: LargestForward) -> None:
    assert work(**values).largest_forward(ranks, packed=packed) == forward


@pytest.mark.parametrize(
    ("values", "split", "engines", "devices"),
    [
        ({}, Split(1, 1, False, 1, 1, False), 1, 1),
        ({f"{A}.strategy": "fsdp2", "trainer.n_gpus_per_node": 4, "trainer.nnodes": 2}, Split(8, 8, False, 1, 8, False), 8, 8),
        ({"trainer.n_gpus_per_node": 4}, Split(1, 1, False, 1, 1, False), 1, 1),
        (
            {f"{A}.strategy": "fsdp2", "trainer.n_gpus_per_node": 8, f"{A}.fsdp_config.fsdp_size": 4, f"{R}.tensor_model_parallel_size": 2},
            Split(8, 8, False, 2, 4, False), 4, 8,
        ),
        ({f"{A}.strategy": "fsdp2", "trainer.n_gpus_per_node": 2, f"{A}.fsdp_config.fsdp_size": 4}, Split(2, 2, False, 1, 2, False), 2, 2),
        (
            {f"{R}.mode": "async", f"{R}.max_head_offpolicyness": 1, f"{R}.num_workers": 3, f"{R}.tensor_model_parallel_size": 2, f"{M}.enable_gradient_checkpointing": True},
            Split(1, 6, True, 2, 1, True), 3, 7,
        ),
        ({f"{R}.mode": "async", f"{R}.num_workers": 3}, Split(1, 1, False, 1, 1, False), 1, 1),
    ],
)  # fmt: skip
def test_the_split_of_a_config(values: dict[str, Any], split: Split, engines: int, devices: int) -> None:
    found = Split.of(config(values))
    assert (found, found.engines, found.devices) == (split, engines, devices)


def test_only_one_rank_on_a_gpu_offloads() -> None:
    gpu, cpu = DEVICES["h200"], DEVICES["cpu"]
    assert is_offloaded(gpu, work(offload=True), Split())
    assert not is_offloaded(gpu, work(), Split()) and not is_offloaded(cpu, work(offload=True), Split())
    assert not is_offloaded(gpu, work(offload=True), Split(2, 2))


def test_seconds_by_part() -> None:
    parts = SecondsByPart({"a": 1.0, "b": 4.0, "c": 0.0})
    parts.add({"a": 2.0, "d": 3.0}, 2.0)
    assert parts == {"a": 5.0, "b": 4.0, "c": 0.0, "d": 6.0} and (parts.total, parts.largest) == (15.0, "d")
    assert parts.ranked() == [("d", 6.0), ("a", 5.0), ("b", 4.0)]
    assert parts.times(2.0) == {"a": 10.0, "b": 8.0, "c": 0.0, "d": 12.0}
    assert SecondsByPart.sum([{"a": 1.0}, {"a": 2.0, "b": 1.0}]) == {"a": 3.0, "b": 1.0}


def test_lengths_agree_with_a_sample_of_them() -> None:
    lengths, draw = Lengths(60.0, 200, 0.8), random.Random(3)
    assert lengths.sigma == pytest.approx(math.sqrt(math.log(1 + 0.64)))
    sample = sorted(lengths.quantile(draw.random()) for _ in range(8_000))
    mean = sum(sample) / len(sample)
    assert mean == pytest.approx(60.0, rel=0.02) and max(sample) == 200.0
    for length in (20.0, 60.0, 150.0):
        share = sum(x > length for x in sample) / len(sample)
        assert lengths.survival(length) == pytest.approx(share, abs=0.01)
        assert lengths.quantile(1 - lengths.survival(length)) == pytest.approx(length)
    assert lengths.residual_mean == pytest.approx(sum(x * x for x in sample) / len(sample) / 2 / mean, rel=0.03)
    longest = [max(draw.choices(sample, k=8)) for _ in range(2000)]
    assert lengths.longest_of(8) == pytest.approx(sum(longest) / 2000, rel=0.02)
    assert lengths.longest_of(1) == pytest.approx(60.0, rel=0.01)
    left = [x - draw.random() * x for x in draw.choices(sample, weights=sample, k=8_000)]
    for (middle, _), share in list(zip(lengths.grid, lengths.residuals))[10::30]:
        assert share == pytest.approx(sum(x > middle for x in left) / len(left), abs=0.02)


def test_lengths_at_their_ends() -> None:
    lengths = Lengths(60.0, 200, 0.8)
    assert (lengths.survival(0), lengths.survival(-1), lengths.survival(200), lengths.survival(201)) == (
        1.0,
        1.0,
        0.0,
        0.0,
    )
    assert lengths.quantile(1.0) == lengths.quantile(2.0) == 200.0 and 0 < lengths.quantile(0.0) < 1
    assert sum(width for _, width in lengths.grid) == pytest.approx(200.0)
    even = Lengths(60.0, 200, 0.0)
    assert even.constant and not lengths.constant and Lengths(199.9, 200, 0.8).constant
    assert not Lengths(199.7, 200, 0.8).constant
    assert (even.survival(59.9), even.survival(60.0), even.quantile(0.1)) == (1.0, 0.0, 60.0)
    assert sum(width for _, width in even.grid) == pytest.approx(60.0)
    assert Lengths(200.0, 200, 0.8).constant
    for mean in (0.0, -1.0, 200.1):
        with pytest.raises(ValueError, match="must be above 0 and at most the longest, 200"):
            Lengths(mean, 200, 0.8)


def test_transfers_by_hand(seven, h200) -> None:
    assert [machines(h200, n) for n in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    size, share, hop = 2.0 * seven.parameters, constants.COLLECTIVE_SHARE, constants.HOP_S
    reduced = 2 * 1e9 * 3 / 4 / (h200.network * share) + 2 * 2 * hop
    assert reduce_seconds(h200, 4, 1e9) == pytest.approx(reduced)
    far = publish_seconds(seven, h200, 1, 16, separate=True)
    sent = 2 * size / (h200.network * 8 * share) + 2 * hop
    assert far == pytest.approx(2 * size / constants.HOST_COPY + sent)
    near = publish_seconds(seven, h200, 1, 7, separate=True)
    assert near == pytest.approx(2 * size / constants.HOST_COPY)
    few = publish_seconds(seven, h200, 8, 2, separate=True) - publish_seconds(seven, h200, 8, 2, separate=False)
    assert few == pytest.approx(2 * size / constants.HOST_COPY + 2 * size / (h200.network * 2 * share) + hop)
    assert checkpoint_bytes(seven, h200) == 14 * seven.parameters
    assert checkpoint_bytes(seven, in_float32(h200)) == 12 * seven.parameters


def test_intervals_between_checkpoints_by_hand() -> None:
    assert young_interval(50.0, 10_000.0) == pytest.approx(1000.0)
    x = 50.0 / 20_000.0
    assert daly_interval(50.0, 10_000.0) == pytest.approx(1000.0 * (1 + math.sqrt(x) / 3 + x / 9) - 50.0)
    assert daly_interval(200.0, 100.0) == 100.0 and daly_interval(199.0, 100.0) != 100.0
    shares = {tau: useful_share(tau, 50.0, 20.0, 10_000.0) for tau in (500.0, 950.0, 2000.0)}
    assert max(shares, key=lambda tau: shares[tau]) == 950.0
    assert shares[500.0] == pytest.approx(500 / (10_000 * math.exp(0.002) * (math.exp(0.055) - 1)))
    assert useful_share(501.0, 0.0, 0.0, 1.0) == 0.0 and useful_share(500.0, 0.0, 0.0, 1.0) > 0.0


def test_a_step_of_several_devices_and_without_graphs(shape, h200) -> None:
    one, two = DecodeCost(shape, h200).step(4, 100), DecodeCost(shape, h200, tp=2).step(4, 100)
    assert two[WEIGHTS] == pytest.approx(one[WEIGHTS] / 2) and two[HEAD] == pytest.approx(one[HEAD] / 2)
    sent = 2 * 4 * 8 * 2 / (h200.link * constants.COLLECTIVE_SHARE)
    assert two[EXCHANGE] == pytest.approx(2 * 2 * (constants.HOP_S + sent)) and EXCHANGE not in one
    assert two[LAUNCH] == one[LAUNCH]
    eager = DecodeCost(shape, h200, eager=True).step(4, 100)
    assert eager == {LAUNCH: pytest.approx(2 * h200.eager_layer_s)}  # the device waits for the host
    busy = DecodeCost(shape, h200, eager=True).step(4_000_000, 100_000)
    assert len(busy) > 1 and busy[LAUNCH] == pytest.approx(2 * h200.eager_layer_s)


def test_what_a_rank_and_an_engine_hold_by_hand(shape) -> None:
    model, asked = (
        ModelSize(shape, 1400, 1400, 50.0, 7.0),
        work(token_budget=1 << 20, prefill_tokens=100, score_share=0.0),
    )
    cpu = Chip("cpu", 1e9, number_bytes=4)
    held = trainer_memory(model, cpu, asked, Split()).held
    tokens, temporaries = 24 * 32, 4 * (3 * 16 + 4 * 8)
    assert held == {
        "parameters": 4 * 1400,
        "optimiser": 8 * 1400,
        "gradients": 4 * 1400,
        "activations of a micro-batch": tokens * (2 * 50 + 7),
        "temporaries of a layer": tokens * temporaries,
        "logits of a chunk": constants.LOGIT_COPIES * 24 * 20 * 10 * 4,
    }
    again = trainer_memory(model, cpu, asked, Split(checkpointing=True)).held
    assert again["activations of a micro-batch"] == tokens * (2 * 8 * 4 + 50 + 7)
    engine = engine_memory(model, cpu, asked, tp=2, slots=3, slot_tokens=32)
    kv = shape.kv_bytes(4)
    assert engine.held == {
        "parameters": 4 * 1400 / 2,
        "KV cache": 3 * 32 * kv / 2,
        "prefill": 3 * 12 * (temporaries + kv) / 2,
        "logits of a step": constants.DECODE_LOGIT_COPIES * 3 * 10 * 4 / 2,
    }
    assert set(engine.only) == {"prefill", "logits of a step"}
    gpu = Chip("h200", 1e9)
    assert set(engine_memory(model, gpu, asked, tp=1, slots=30, slot_tokens=32).only) == {"prefill"}
    assert engine_memory(model, gpu, asked, tp=1, slots=30, slot_tokens=32).held["prefill"] == 100 * temporaries / 2
    assert set(engine_memory(model, gpu, work(eager=True), tp=1, slots=1, slot_tokens=1).only) == {
        "prefill",
        "logits of a step",
    }
    assert parameter_bytes(model, 2, work(four_bit=True)) == 2 * (1400 - 2 * 656) + 0.5625 * 2 * 656
    assert ModelSize.of(shape, 2).other_kept == 3 * 8 * 2 and ModelSize.of(shape, 2).trained == shape.parameters


def test_the_choices_of_a_search(seven, h200) -> None:
    assert seven.heads == 28 and h200.per_machine == 8
    assert [tensor_parallel(seven, h200, n) for n in (1, 2, 3, 8, 12, 16)] == [
        [1],
        [1, 2],
        [1],
        [1, 2, 4],
        [1, 2, 4],
        [1, 2, 4],
    ]
    assert [shard_sizes(n) for n in (1, 2, 6, 8, 12)] == [[1], [1, 2], [1, 2, 6], [1, 2, 4, 8], [1, 2, 4, 12]]
    assert trainer_counts(1, 8) == [] and trainer_counts(16, 8) == list(range(1, 16))
    assert trainer_counts(17, 8) == [8, 16] and trainer_counts(24, 8) == [8, 16]
    assert trainer_counts(33 * 8, 8) == [8 * n for n in range(1, 33)]
    many = trainer_counts(100 * 8, 8)
    assert many[0] == 8 and many[-1] == 99 * 8 and 32 <= len(many) <= 40 and all(n % 8 == 0 for n in many)
    assert {8 * 2**i for i in range(7)} <= set(many)


def test_a_synchronous_step_is_the_sum_of_its_stages(seven, h200) -> None:
    asked = Workload(
        64, 8, 128.0, 128, Lengths(700.0, 2048, 0.8), mini_batches=4, score_share=0.75, reference=True, critic=True
    )
    split = Split(8, 8, False, 1, 8, True)
    found = predict(seven, h200, asked, split)
    assert found is not None and set(found.stages) == {
        "gen",
        "old_log_prob",
        "update_actor",
        "ref",
        "values",
        "update_critic",
        "update_weights",
    }
    assert found.step_s == pytest.approx(sum(found.stages.values())) == pytest.approx(found.parts.total)
    train = TrainCost(seven, h200, split)
    assert found.stages["old_log_prob"] == pytest.approx(train.score(asked).total)
    assert found.stages["ref"] == found.stages["values"] == pytest.approx(train.reference(asked).total)
    assert found.stages["update_critic"] == pytest.approx(
        train.update(dataclasses.replace(asked, compiled=False)).total
    )
    assert found.stages["update_weights"] == pytest.approx(publish_seconds(seven, h200, 8, 8, False))
    rows = 64 * 8 / 8
    engine = DecodeCost(seven, h200)
    assert found.slots == rows == found.rollout.rows
    assert found.stages["gen"] == pytest.approx(generate(engine, rows, 8, 64, asked.lengths, 128.0, 8).total)
    context = 128.0 + asked.lengths.residual_mean
    assert found.rollout.step_s == pytest.approx(engine.step(rows, context).total)
    assert found.rollout.single_s == pytest.approx(engine.step(8, context).total)
    assert found.group_s == pytest.approx(asked.lengths.longest_of(8) * found.rollout.step_s)
    assert found.tokens_per_s == pytest.approx(512 * 700.0 / found.step_s) and found.mode == "one pool, sync"
    assert found.limit == max(found.parts, key=lambda name: found.parts[name])


def test_with_rounds_each_is_waited_for_and_running_ahead_the_slowest_side_decides(seven, h200) -> None:
    asked = Workload(64, 8, 128.0, 128, Lengths(700.0, 2048, 0.8), mini_batches=4, slots=512)
    split = Split(8, 8, True, 2, 8, True)
    halved = predict(seven, h200, dataclasses.replace(asked, keep_rate=0.5), split)
    engine = DecodeCost(seven, h200, 2)
    rows = [64 * 8 / 4 / 2**i for i in range(8) if 64 / 2**i >= 0.5]
    assert halved is not None and halved.mode == "two pools, sync"
    wanted = sum(generate(engine, n, 4, halved.slots, asked.lengths, 128.0, 8).total for n in rows)
    assert halved.stages["gen"] == pytest.approx(wanted)
    ahead = predict(seven, h200, dataclasses.replace(asked, eta=2), split)
    assert ahead is not None and ahead.mode == "two pools, async, η=2"
    train = ahead.stages["old_log_prob"] + ahead.stages["update_actor"] + ahead.stages["update_weights"]
    bound = (ahead.rollout.longest_s + train) / 3
    assert ahead.stages["staleness bound"] == pytest.approx(bound)
    assert ahead.step_s == pytest.approx(max(ahead.stages["gen"], train, bound))
    running = 2 * 64 * 8 * asked.running_share
    assert ahead.rollout.rows == pytest.approx(min(ahead.slots, running / 4))
    decode = steady(engine, ahead.rollout.rows, 128.0, asked.lengths, 8).total
    pause = seven.parameters * 2 / 2 / constants.HOST_COPY
    engines = min(4.0, running / ahead.rollout.rows)
    groups = ahead.rollout.rows / (8 * asked.running_share)
    computed_again = again(engine, ahead.rollout.rows, 128.0, asked.lengths, groups)
    seconds = (512 * 700.0 * decode / (engines * ahead.rollout.rows) + computed_again) / 0.92
    assert ahead.stages["gen"] == pytest.approx(seconds + pause)
    assert ahead.rollout.longest_s == pytest.approx(asked.lengths.longest_of(512) * decode)


def test_a_stream_on_a_gpu_runs_full_and_computes_its_caches_again_after_each_update(h200) -> None:
    asked = Workload(
        256, 8, 128.0, 128, Lengths(700.0, 1024, 0.4), max_staleness=2, in_flight=768, slots=1024, fills_slots=True
    )
    small = SHAPES["1.5b"]
    engine, split = DecodeCost(small, h200), Split(1, 1, False, 1, 1, True)

    def gen(**changed) -> tuple[float, float]:
        made = predict(small, h200, dataclasses.replace(asked, **changed), split)
        assert made is not None
        return made.rollout.rows, made.stages["gen"]

    rows, seconds = gen()
    assert rows == 1024
    step = steady(engine, 1024.0, 128.0, asked.lengths, 8).total
    tokens = 1024 * asked.lengths.residual_mean
    by_hand = 2 * small.active_body * tokens / 790e12  # products of what the responses have so far
    computed_again = again(engine, 1024.0, 128.0, asked.lengths, 1024 / (8 * asked.running_share))
    assert 1.1 * by_hand < computed_again < 2 * by_hand
    assert seconds == pytest.approx((2048 * 700.0 * step / 1024 + computed_again) / 0.92)
    assert gen(keeps_cache=True) == (1024, pytest.approx(2048 * 700.0 * step / 1024 / 0.92))
    assert gen(fills_slots=False, in_flight=64)[0] == pytest.approx(512 * asked.running_share)
    assert gen(in_flight=64)[0] == 512


def test_a_cache_is_computed_after_what_has_its_own(shape, h200) -> None:
    engine = DecodeCost(shape, h200)
    kept = 2 * (4 * 16 + 6 * 8 + 2 * 8 + 2 * 8 + 2 * 8)
    operations = 3 * (10 * 2 * (2 * 656 + 8) + 4 * 2 * 8 * (10 * 50 + 10 * 10 / 2) + 2 * 80)
    traffic = 3 * 10 * 2 * kept * constants.TRAFFIC_PASSES / (0.85 * 4.8e12)
    assert engine.prefill_seconds(3, 10, 50) == pytest.approx(operations / 790e12 + traffic)
    both = dataclasses.replace(engine, tp=2)
    assert both.prefill_seconds(3, 10, 50) == pytest.approx((operations / 790e12 + traffic) / 2)


def test_a_forward_and_an_update_by_hand_on_a_cpu(shape) -> None:
    cpu = DEVICES["cpu"]
    asked = Workload(
        2, 4, 10.0, 10, Lengths(20.0, 20, 0.0), layout="packed", mini_batches=2, epochs=3, token_budget=1 << 20
    )
    tokens, pairs, targets = 4 * 30, 4 * (50 + 200 + 200), 4 * 20
    share, rate = cpu.train_share, cpu.reached_bandwidth
    forward = {
        "matrix products of training": tokens * 2 * (2 * 656 + 8) / cpu.matmul / share,
        "attention in training": shape.attention_operations(pairs) / cpu.attention_rate,
        "output head in training": 2 * targets * 80 / cpu.head_rate / share,
    }
    kept = tokens * 2 * shape.kept_bytes(cpu.number_bytes)
    passes, logits = constants.TRAFFIC_PASSES, constants.LOGIT_PASSES
    trainer = TrainCost(shape, cpu)
    one = trainer.reference(asked)
    for name, seconds in forward.items():
        assert one[name] == pytest.approx(2 * seconds, rel=1e-3)
    assert one["memory traffic of training"] == pytest.approx(
        2 * (passes * kept + logits * targets * 10 * 4) / rate / share
    )
    update = trainer.update(asked)
    assert update["matrix products of training"] == pytest.approx(3 * 3 * one["matrix products of training"])
    assert update["output head in training"] == pytest.approx(3 * 3 * one["output head in training"])
    optimizer = constants.OPTIMIZER_BYTES * shape.parameters / rate / share
    assert update["optimiser"] == pytest.approx(3 * 2 * optimizer)
    assert trainer.score(dataclasses.replace(asked, score_share=0.5)).total == pytest.approx(one.total / 2)
    assert trainer.score(dataclasses.replace(asked, score_share=0.0)) == {}
