"""Which models are compiled, and that compiled layers are in use only where they are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.kernels import compiled_layers as compiled
from gspo.kernels.compiled_layers import MAX_VARIANTS, CompiledLayers, has_cpp_compiler, worth_compiling
from tests.rollout.models import make_model


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(compiled, "MIN_PARAMETERS", 0)
    monkeypatch.setattr(compiled, "has_cpp_compiler", lambda: True)


def test_a_small_model_is_not_worth_it_and_one_of_the_least_size_is(monkeypatch):
    model = make_model("llama")
    size = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(compiled, "has_cpp_compiler", lambda: True)
    assert not worth_compiling(model)
    monkeypatch.setattr(compiled, "MIN_PARAMETERS", size)
    assert worth_compiling(model)
    monkeypatch.setattr(compiled, "MIN_PARAMETERS", size + 1)
    assert not worth_compiling(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_float32_is_compiled_on_a_cpu(any_size, dtype):
    model = make_model("llama")
    assert worth_compiling(model)
    assert not worth_compiling(model.to(dtype))


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_are_not_compiled(any_size, family):
    assert not worth_compiling(make_model(family))


def test_deterministic_algorithms_alone_switch_it_off(any_size):
    model = make_model("llama")
    torch.use_deterministic_algorithms(True)
    try:
        assert not worth_compiling(model)
    finally:
        torch.use_deterministic_algorithms(False)
    assert worth_compiling(model)


def test_without_a_compiler_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "MIN_PARAMETERS", 0)
    program = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(program))
    assert not has_cpp_compiler() and not worth_compiling(make_model("llama"))
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert has_cpp_compiler() and worth_compiling(make_model("llama"))


def test_layers_are_left_as_they_were_when_a_forward_fails():
    model = make_model("llama")
    layers = CompiledLayers(model.base_model, backend="eager")
    with pytest.raises(RuntimeError, match="on purpose"), layers.active():
        assert all("forward" in vars(layer) for layer in model.model.layers)
        raise RuntimeError("on purpose")
    assert not any("forward" in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize(("before", "after"), [(2, MAX_VARIANTS), (1000, 1000)])
def test_torch_is_asked_to_keep_enough_variants_of_a_layer(before, after):
    """Beyond its limit torch runs a new variant as it is: its bits would depend on what was compiled before."""
    with torch._dynamo.config.patch(recompile_limit=before):
        CompiledLayers(make_model("llama").base_model, backend="eager")
        assert torch._dynamo.config.recompile_limit == after


calls: list[str] = []


@torch.library.custom_op("gspo_tests::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    calls.append("forward")
    return x.sin()


@attention.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("gspo_tests::attention_backward", mutates_args=())
def attention_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    calls.append("backward")
    return grad * x.cos()


@attention_backward.register_fake
def _(grad, x):
    return torch.empty_like(x)


attention.register_autograd(
    lambda ctx, grad: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Layer(GradientCheckpointingLayer):
    """Products around an operation that torch does not know, and cheap operations after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(attention(self.first(x)).exp().tanh()).sigmoid()


def test_the_backward_of_a_layer_does_not_compute_attention_again():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    layers = CompiledLayers(model, backend="aot_eager_decomp_partition")
    layers._recomputes = True  # as on a GPU
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    calls.clear()
    with layers.active():
        model(x).sum().backward()
    assert calls == ["forward", "forward", "backward", "backward"]
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
