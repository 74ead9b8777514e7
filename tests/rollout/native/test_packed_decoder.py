"""Decoding with compiled layers on a CPU: the same tokens, the trainer's log-probs, the same bits twice."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.utils import counters

from gspo.kernels import compiled_layers as compiled
from gspo.kernels import small_batch_linear
from gspo.kernels.compiled_layers import CompiledLayers, has_cpp_compiler
from gspo.rollout.native import packed_decoder
from gspo.training.lora import Adapters, LoraSettings
from tests.rollout.models import drain, make_engine, make_model, make_request, plain_log_probs

pytestmark = pytest.mark.usefixtures("no_compiled_code")


@pytest.fixture(autouse=True)
def _large_enough(monkeypatch):
    monkeypatch.setattr(compiled, "MIN_PARAMETERS", 0)


@pytest.fixture
def traced(monkeypatch):
    """Layers are traced as for compiling, but run by torch's own kernels; no compiler is needed."""
    monkeypatch.setattr(compiled, "has_cpp_compiler", lambda: True)
    monkeypatch.setattr(packed_decoder, "CompiledLayers", partial(CompiledLayers, backend="eager"))


def requests(temperature: float = 1.0):
    """Groups that end one after another, so that rows drain to one."""
    sizes = [(1, 3), (4, 5), (2, 9), (3, 12), (1, 30)]
    return [make_request(i, n=n, max_tokens=most, temperature=temperature) for i, (n, most) in enumerate(sizes)]


def tokens(groups):
    return {g.prompt.uid: [r.token_ids for r in g.rollouts] for g in groups}


def run(engine, temperature: float = 1.0):
    """In-flight groups with a `generate` in between; everything that came out."""
    for request in requests(temperature):
        engine.submit(request)
    done = engine.step()
    between = engine.generate([make_request(20, n=3, max_tokens=7, temperature=temperature)])
    return done + between + drain(engine)


def check(engine, model, plain) -> None:
    """Greedy tokens of the uncompiled engine, log-probs of a full forward, nothing traced after the start."""
    assert engine.description == "padded cache, compiled"
    made = counters["stats"]["unique_graphs"]
    eager = make_engine(plain, num_slots=16, eager=True)
    assert eager.description == "padded cache"
    assert tokens(run(engine, 0.0)) == tokens(run(eager, 0.0))
    first = run(engine)
    for group in first:
        for rollout in group.rollouts:
            want = plain_log_probs(plain, group.prompt.token_ids, rollout.token_ids)
            assert rollout.log_probs == pytest.approx(want, abs=1e-4)
    assert run(make_engine(model, num_slots=16)) == first, "a second engine gives the same bits"
    assert counters["stats"]["unique_graphs"] == made, "a step was compiled for after the start"
    untouched(model)


def untouched(model) -> None:
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} <= {nn.Linear}
    assert not any("forward" in vars(m) for m in model.modules())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
def test_compiled_code_draws_the_same_tokens_and_the_same_bits_twice():
    model = make_model("llama")
    check(make_engine(model, num_slots=16), model, make_model("llama"))


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "gpt2"])
def test_biases_windows_and_other_attention_modules(traced, family):
    model = make_model(family)
    check(make_engine(model, num_slots=16), model, make_model(family))


def test_new_weights_are_seen(traced):
    model, other = make_model("llama"), make_model("llama", seed=1)
    engine = make_engine(model, num_slots=16)
    before = tokens(engine.generate(requests(0.0)))
    for request in requests(0.0):
        engine.submit(request)
    engine.load_weights(dict(other.named_parameters()), 1)
    want = tokens(make_engine(other, num_slots=16, eager=True).generate(requests(0.0)))
    assert tokens(drain(engine)) == want != before
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), make_model("llama").parameters()):
            parameter.copy_(new)  # as an optimiser does
    engine.load_weights(None, 2)
    assert tokens(engine.generate(requests(0.0))) == before


def test_adapters_are_applied(traced):
    models = [make_model("llama") for _ in range(2)]
    for model in models:
        Adapters(model, LoraSettings(4, target_modules=["q_proj", "o_proj", "up_proj"]), seed=1)
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                nn.init.normal_(parameter, std=0.3)
    bare = tokens(make_engine(make_model("llama"), num_slots=16, eager=True).generate(requests(0.0)))
    engine = make_engine(models[0], num_slots=16)
    assert engine.description == "padded cache, compiled"
    got = tokens(engine.generate(requests(0.0)))
    assert got == tokens(make_engine(models[1], num_slots=16, eager=True).generate(requests(0.0))) != bare


def test_a_model_that_is_being_trained_is_tried_without_dropout(traced):
    model = make_model("gpt2").train()
    engine = make_engine(model)
    assert engine.description == "padded cache, compiled" and model.training


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe"])
def test_eager_attention_and_experts_run_as_they_are(traced, family):
    assert make_engine(make_model(family)).description == "padded cache"


def test_half_precision_runs_as_it_is(traced):
    assert make_engine(make_model("llama").to(torch.bfloat16)).description == "padded cache"


def test_a_model_whose_logits_would_change_runs_as_it_is(traced, monkeypatch, caplog):
    linear = small_batch_linear.linear
    monkeypatch.setattr(small_batch_linear, "linear", lambda *args: linear(*args) * 1.01)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(make_model("llama"))
    assert engine.description == "padded cache" and "logits differ by 0.01" in caplog.text


def test_a_compiler_that_fails_leaves_generation_as_it_was(monkeypatch, tmp_path, caplog):
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = make_model("llama")
    with inductor.patch({"cpp.cxx": (None, str(program))}), caplog.at_level(logging.WARNING):
        engine = make_engine(model, num_slots=16)
        got = tokens(run(engine, 0.0))
    assert engine.description == "padded cache" and "generation runs uncompiled" in caplog.text
    untouched(model)
    assert got == tokens(run(make_engine(make_model("llama"), num_slots=16, eager=True), 0.0))
