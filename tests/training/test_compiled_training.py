"""Training with compiled layers on a CPU: exact ratios, the same gradients, nothing compiled after the start."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
import torch._inductor.config as inductor
from torch._dynamo.utils import counters
from torch.nn import Embedding, Linear

from gspo.kernels.compiled_layers import CompiledLayers, has_cpp_compiler
from gspo.training import forward
from gspo.training.batch.batching import collate
from gspo.training.policy import PolicySettings, TokenScorer
from gspo.types import Prompt, TrainBatch
from tests.training.models import VOCAB, gpt2, llama, qwen3_moe
from tests.training.test_policy import groups

pytestmark = pytest.mark.usefixtures("no_compiled_code")


@pytest.fixture
def traced(monkeypatch):
    """Layers are traced and differentiated as for compiling, but run by torch's own kernels."""
    monkeypatch.setattr(forward, "CompiledLayers", lambda model: CompiledLayers(model, backend="aot_eager"))


@pytest.fixture
def broken_compiler(monkeypatch, tmp_path):
    """A compiler that fails, and no cached code."""
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with inductor.patch({"cpp.cxx": (None, str(program))}):
        yield


def scorer(model, compiled=True, **settings) -> TokenScorer:
    return TokenScorer(model, PolicySettings(**{"mini_batch_groups": 2, "compiled": compiled, **settings}))


def batches() -> list[TrainBatch]:
    """Of one response to many, short prompts and long ones, rows of equal length and not."""
    made = [collate(groups(num, n, seed=seed)) for seed, (num, n) in enumerate([(3, 4), (1, 1), (6, 2)])]
    long = groups(2, 3, seed=9)
    long = [dataclasses.replace(g, prompt=Prompt(g.prompt.uid, (), tuple(i % VOCAB for i in range(90)))) for g in long]
    return [*made, collate(long)]


def run(one: TokenScorer, batch: TrainBatch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of each micro-batch and the gradients of a weighted sum of them, as in an update."""
    one.model.zero_grad()
    found = []
    with one.runner.running():
        for micros in one.plan(batch):
            for rows in micros:
                log_probs, _ = one.forward(one.micro(batch, rows), entropy=True)
                found.append(log_probs.detach())
                (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
    return found, {n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None}


def check(compiled: TokenScorer, plain: TokenScorer) -> None:
    """Ratios of equal weights are 1 to the bit, and log-probs and gradients those of the model as it is."""
    for batch in batches():
        old, _ = compiled.log_probs(batch)
        assert torch.allclose(old, plain.log_probs(batch)[0], atol=1e-4)
        got, gradients = run(compiled, batch)
        rows = [r for micros in compiled.plan(batch) for r in micros]
        assert all(torch.equal(x, old[r]) for x, r in zip(got, rows, strict=True))
        _, want = run(plain, batch)
        size = torch.stack([g.norm() for g in want.values()]).norm()
        assert gradients.keys() == want.keys()
        assert max((gradients[n] - want[n]).norm() / size for n in want) < 1e-5


needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")


@needs_compiler
def test_compiled_code_gives_exact_ratios_and_the_same_gradients_and_is_made_at_the_start():
    plain = scorer(llama(), compiled=False)
    compiled = scorer(llama())
    assert compiled.runner.layers is not None
    made = counters["stats"]["unique_graphs"]
    check(compiled, plain)
    recomputing = llama()
    recomputing.gradient_checkpointing_enable()
    check(scorer(recomputing), plain)
    assert counters["stats"]["unique_graphs"] == made, "a batch was compiled for after the start"


@pytest.mark.slow
@needs_compiler
def test_a_frozen_model_of_equal_weights_gives_the_same_bits():
    """It runs code without a backward: its KL from the policy starts at 0 all the same."""
    policy, reference = scorer(llama()), scorer(llama().requires_grad_(False))
    assert policy.runner.layers is not None and reference.runner.layers is not None
    made = counters["stats"]["unique_graphs"]
    for batch in batches():
        assert torch.equal(reference.log_probs(batch)[0], policy.log_probs(batch)[0])
    assert counters["stats"]["unique_graphs"] == made


def test_a_family_with_learned_positions_is_traced_once_and_gives_the_same(traced):
    """Its positions end at 110: a longer trial would fail, and the model run uncompiled for no reason."""
    models = [gpt2(), gpt2()]
    for model in models:
        torch.manual_seed(1)
        model.transformer.wpe = Embedding(110, 32)
        model.config.n_positions = 110
    compiled = scorer(models[0])
    assert compiled.runner.layers is not None
    assert all(p.grad is None for p in models[0].parameters()), "the trial leaves nothing behind"
    made = counters["stats"]["unique_graphs"]
    check(compiled, scorer(models[1], compiled=False))
    assert counters["stats"]["unique_graphs"] == made


def test_experts_run_as_they_are_even_if_asked(traced):
    """A reference may be another model than the policy whose settings it has."""
    assert scorer(qwen3_moe()).runner.layers is None


def test_a_compiler_that_fails_leaves_training_as_it_was(broken_compiler, caplog):
    model = llama()
    with caplog.at_level(logging.WARNING):
        one = scorer(model)
    assert one.runner.layers is None and one.runner.kind == "shared"
    assert "training runs uncompiled" in caplog.text
    assert not any("forward" in vars(m) for m in model.modules())
    assert {type(m) for m in model.modules() if isinstance(m, Linear)} == {Linear}
    assert model.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in model.parameters())
    (batch, *_) = batches()
    assert torch.equal(one.log_probs(batch)[0], scorer(llama(), compiled=False).log_probs(batch)[0])
