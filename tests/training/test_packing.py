"""Packed and prefix-shared micro-batches: the same values and gradients as padded rows, and no token too many."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from gspo.kernels import cpu_attention
from gspo.kernels.cpu_attention import PackedSequences
from gspo.kernels.cpu_library import compiler
from gspo.models.output_head import Head
from gspo.training.batch import packing
from gspo.training.batch.batching import balance, collate, micro_batch, plan_micro_batches
from gspo.training.forward import Forward, _captures, _unsupported
from gspo.training.log_probs import chosen_log_probs
from tests.rollout.models import CONFIGS, make_model
from tests.training.models import llama
from tests.training.test_policy import groups, policy, ready, token_loss

DENSE_AND_MOE = ("llama", "qwen3-moe")


@pytest.fixture
def float64(monkeypatch):
    """Models that round to float32 on the way (norms, rotary tables, softmax) keep float64 throughout."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def exact(family):
    """A model in float64, whose experts are computed one by one: the grouped product knows no float64."""
    model = make_model(family).double()
    if family in ("qwen3-moe", "mixtral"):
        model.set_experts_implementation("eager")
    return model


def gradients(model, kind, *, flex=False, batch=None, checkpointing=False):
    """Log-probs of a ragged batch and the gradient of a function of them that treats every token differently."""
    batch = batch or collate(groups(num=3))
    if checkpointing:
        model.gradient_checkpointing_enable()
    forward = Forward.of(model.base_model, kind, flex=flex)
    assert forward.reason is None and forward.kind == kind
    micro, head = forward.micro(batch, list(range(batch.num_sequences)), "cpu"), Head.of(model)
    model.zero_grad()
    with forward.running():
        hidden = micro.hidden(forward.decoder)
        values, entropy = chosen_log_probs(head, hidden, micro.targets, 0.8, entropy=True)
        out = micro.scatter(values)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out.sin() * weights).sum().add(0.1 * entropy.sum()).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), found


def close(a, b, tolerance):
    assert torch.allclose(a[0], b[0], atol=tolerance, rtol=tolerance)
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        scale = max(1.0, a[1][name].abs().max().item())
        assert (a[1][name] - b[1][name]).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_packed_gradients_are_those_of_padded_rows(family, kind, float64):
    model = exact(family)
    close(gradients(model, "plain"), gradients(model, kind), 1e-10)


@pytest.mark.parametrize("family", DENSE_AND_MOE)
@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_float32_gradients_agree(family, kind):
    model = make_model(family)
    close(gradients(model, "plain"), gradients(model, kind), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_flex_attention_sees_the_same_tokens(family, float64):
    """Forward only: flex_attention has no backward on a CPU."""
    model = exact(family)
    batch = collate(groups(num=3))
    hidden = []
    for flex in (False, True):
        forward = Forward.of(model.base_model, "shared", flex=flex)
        assert forward.reason is None
        with forward.running(), torch.no_grad():
            hidden.append(forward.micro(batch, list(range(12)), "cpu").hidden(forward.decoder))
    assert torch.allclose(*hidden, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma2"])
def test_cutting_attention_into_blocks_changes_nothing(family, monkeypatch, float64):
    model = exact(family)
    whole = gradients(model, "shared")
    monkeypatch.setattr(packing, "CHEAP_SCORES", 0)
    monkeypatch.setattr(packing, "MASKED_SCORES", 0)
    batch = collate(groups(num=3))
    blocks = micro_batch(batch, list(range(12)), "cpu", "shared").layout.blocks
    assert len(blocks) > 4
    close(whole, gradients(model, "shared"), 1e-10)


@pytest.mark.parametrize("kind", ["plain", "packed", "shared"])
def test_gradient_checkpointing_recomputes_and_changes_no_gradient(kind):
    model = llama()
    kept = gradients(model, kind)
    calls = []
    handle = model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    again = gradients(model, kind, checkpointing=True)
    handle.remove()
    assert sum(calls) == 2  # the forward and its recomputation; probes keep no gradient
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])
    assert "forward" not in vars(model.base_model.layers[0])


def test_dropout_stays_off_when_layers_are_recomputed():
    model = make_model("gpt2")
    assert any(m.p > 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    results = [gradients(model, "shared", checkpointing=True)[0] for _ in range(2)]
    assert torch.equal(*results)


@pytest.mark.parametrize("layout", ["plain", "packed", "shared"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3"])
def test_the_first_ratio_is_one_to_the_last_bit_in_every_layout(family, layout):
    p = policy(make_model(family), micro_batch_tokens=48, mini_batch_groups=6, layout=layout)
    assert p.runner.kind == layout
    assert sum(len(micros) for micros in p.plan(collate(groups()))) > 2
    assert p.update(ready(p), token_loss, step=0).metrics["off"].result() == 0


def test_a_prompt_is_computed_once_and_last_tokens_never():
    batch = collate(groups(num=4))
    rows = list(range(batch.num_sequences))
    prompts = [len(p) for p in batch.prompt_ids]
    answers = sum(len(r) - 1 for r in batch.response_ids)
    shared, packed = (micro_batch(batch, rows, "cpu", kind) for kind in ("shared", "packed"))
    assert shared.input_ids.shape == (1, sum(prompts[::4]) + answers)
    assert packed.input_ids.shape == (1, sum(prompts) + answers)


def test_a_lone_response_is_packed_as_one_sequence():
    batch = collate(groups(num=3))
    micro = micro_batch(batch, [1, 4, 5], "cpu", "shared")
    assert [block.queries.num_rows for block in micro.layout.blocks] == [2, 2]
    assert len(micro.layout.shared) == 1


def test_responses_of_one_token_need_only_their_prompt(float64):
    batch = collate(groups(num=2))
    short = dataclasses.replace(batch, response_ids=[r[:1] for r in batch.response_ids])
    micro = micro_batch(short, list(range(8)), "cpu", "shared")
    assert micro.input_ids.numel() == len(batch.prompt_ids[0]) + len(batch.prompt_ids[4])
    model = exact("llama")
    close(gradients(model, "plain", batch=short), gradients(model, "shared", batch=short), 1e-10)


def test_an_empty_response_counts_for_nothing_in_every_layout():
    group = groups(num=1, n=3)[0]
    first, second, third = group.rollouts
    empty = dataclasses.replace(second, token_ids=(), log_probs=(), loss_mask=(), versions=())
    for rollouts in ((first, empty, third), (first, empty, empty), (third, empty)):
        batch = collate([group.with_rollouts(rollouts)])
        plain, packed, shared = (
            policy(llama(), layout=layout).log_probs(batch)[0] for layout in ("plain", "packed", "shared")
        )
        torch.testing.assert_close(packed, plain)
        torch.testing.assert_close(shared, plain)
        assert plain[0].abs().sum() > 0 and not plain[1].any()


def test_a_model_that_cannot_be_packed_says_why_and_runs_in_padded_rows():
    other = make_model("llama", attention="flex_attention")
    forward = Forward.of(other.base_model, "shared")
    assert forward.kind == "plain" and "flex_attention" in forward.reason
    blind = make_model("llama")
    own = blind.base_model.forward
    blind.base_model.forward = lambda position_ids=None, layout=None, **kw: own(**kw)
    forward = Forward.of(blind.base_model, "shared")
    assert forward.kind == "plain" and forward.reason


def test_a_wrong_attention_is_found_before_training(monkeypatch):
    """The probe must tell a response that sees its neighbours from one that does not."""
    monkeypatch.setattr(cpu_attention, "supports", lambda model: False)
    build = packing.Block._build_mask
    monkeypatch.setattr(packing.Block, "_build_mask", lambda *args: torch.zeros_like(build(*args)))
    forward = Forward.of(make_model("llama").base_model, "shared")
    assert forward.kind == "plain" and "differ" in forward.reason


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_kernel_that_attends_wrongly_gives_way_to_sdpa(monkeypatch):
    model = make_model("llama")
    assert Forward.of(model.base_model, "shared").spans_of is PackedSequences.of
    build = PackedSequences.of
    blind = staticmethod(lambda found, device: build([(at, num, 0, 0) for at, num, _, _ in found], device))
    monkeypatch.setattr(PackedSequences, "of", blind)  # responses that do not see their prompts
    forward = Forward.of(model.base_model, "shared")
    assert forward.kind == "shared" and forward.spans_of is None


def test_micro_batches_are_made_again_for_whatever_they_are_made_of():
    forward = Forward.of(llama().base_model, "shared")
    batch = collate(groups())
    made = forward.micro(batch, [0, 1], "cpu")
    assert forward.micro(batch.with_old(batch.rollout_log_probs), [0, 1], "cpu") is made
    for change in (
        {"mask": torch.nn.functional.pad(batch.mask, (0, 3))},
        {"mask": batch.mask * (torch.arange(batch.mask.shape[1]) > 0)},
        {"prompt_ids": [(9, *prompt[1:]) for prompt in batch.prompt_ids]},
        {"response_ids": [(9, *response[1:]) for response in batch.response_ids]},
        {"group_ids": torch.arange(batch.num_sequences)},
    ):
        made = forward.micro(batch, [0, 1], "cpu")
        changed = dataclasses.replace(batch, **change)
        got, want = forward.micro(changed, [0, 1], "cpu"), micro_batch(changed, [0, 1], "cpu", "shared")
        assert got is not made and got.num_response == want.num_response
        for name in ("input_ids", "positions", "targets", "slots"):
            assert torch.equal(getattr(got, name), getattr(want, name)), (change, name)


def test_masks_of_a_micro_batch_are_kept_until_another_one_runs():
    forward = Forward.of(llama().base_model, "shared")
    batch = collate(groups(num=2))
    first = forward.micro(batch, [0, 1], "cpu")
    for block in first.layout.blocks:
        block.masks[None] = torch.zeros(1)
    first.layout.cache[None] = "mask"
    assert forward.micro(batch, [0, 1], "cpu") is first and first.layout.cache
    other = forward.micro(batch, [1, 0], "cpu")  # another order is another micro-batch
    assert other is not first and not first.layout.cache and not any(block.masks for block in first.layout.blocks)
    assert forward.micro(batch, [0, 1], "cpu") is first


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"layer_types": None, "attention_chunk_size": None}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"layer_types": ["full_attention", "linear_attention", "conv"]}, "layers of type conv, linear_attention"),
        ({"attention_chunk_size": 8}, "chunked attention"),
        ({"_attn_implementation": "flex"}, "attn_implementation='flex'; packed training replaces sdpa or eager"),
    ],
)
def test_attention_that_cannot_be_packed_is_named(config, reason):
    """Also where only the second config of a model says so."""
    plain = SimpleNamespace(_attn_implementation="sdpa")
    configs = [plain, SimpleNamespace(**{"_attn_implementation": "eager", **config})]
    assert _unsupported(configs, {"sdpa": "a", "eager": "b"}) == reason


def test_graphs_are_not_captured_where_a_gradient_would_stay_in_their_memory():
    decoder = llama().base_model.bfloat16()
    assert _captures(decoder)
    decoder.norm.float()
    assert not _captures(decoder)
    decoder.norm.requires_grad_(False)
    assert _captures(decoder)


def test_balanced_bins_keep_the_budget():
    costs = [9, 1, 5, 5, 7, 3, 8, 2]
    parts = balance(costs, 12)
    assert sorted(i for part in parts for i in part) == list(range(8))
    sums = [sum(costs[i] for i in part) for part in parts]
    assert len(parts) == 4 and max(sums) <= 12
    assert balance([30, 1, 1], 10) == [[0], [1, 2]]


def test_groups_stay_whole_within_the_token_budget():
    batch = collate(groups(num=6))

    def tokens(rows):
        return micro_batch(batch, rows, "cpu", "shared").input_ids.numel()

    plan = plan_micro_batches(batch, 3, max_tokens=45, max_rows=1, kind="shared")
    for micros, mini in zip(plan, (range(12), range(12, 24))):
        assert sorted(row for rows in micros for row in rows) == list(mini)
        assert len(micros) > 1 and all(tokens(rows) <= 45 for rows in micros)
        for rows in micros:
            assert all(sorted(rows).count(4 * (r // 4) + i) == 1 for r in rows for i in range(4))
    small = plan_micro_batches(batch, 3, max_tokens=16, max_rows=1, kind="shared")
    assert all(tokens(rows) <= 16 or len(rows) == 1 for micros in small for rows in micros)
