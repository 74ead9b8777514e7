"""LoRA over weights in 4 bits: what is quantised, that a run learns and resumes, and that its checkpoint is ordinary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.config import ConfigErrors, load
from gspo.loop.trainer import Trainer
from gspo.models.four_bit import dequantized, four_bit_layers
from gspo.models.load import load_model
from gspo.runs.console import Console
from tests.support.small_run import config, even_first_byte, final_state, make_model

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
MODEL = "actor_rollout_ref.model"
KEYS = (f"{MODEL}.lora_rank=4", f"{MODEL}.load_in_4bit=true", "actor_rollout_ref.actor.optim.eight_bit=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


def open_run(folder: Path, model: Path, *overrides: str) -> Trainer:
    resolved = config(folder, model, *KEYS, "data.num_val_samples=4", "trainer.test_freq=2", *overrides)
    return Trainer(resolved, reward_fn=even_first_byte, console=Console(enabled=False))


def test_linear_layers_are_quantised_to_nf4_and_the_head_is_not(model: Path) -> None:
    plain, narrow = load_model(str(model)), load_model(str(model), four_bit=True)
    layers = four_bit_layers(narrow)
    assert len(layers) == 2 * 7 and "lm_head" not in layers
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        assert layer.weight.nbytes == weight.numel() // 2
        # NF4 has 16 levels between -1 and 1, the widest gap is 0.304: at most half of it per block's largest weight.
        error = (dequantized(layer) - weight.detach()).abs().reshape(-1, 64)
        assert bool((error <= 0.153 * weight.abs().reshape(-1, 64).amax(1, keepdim=True)).all())
        assert float(error.max()) > 0


def test_gradients_flow_through_layers_in_4_bits_as_through_plain_ones(model: Path) -> None:
    layer = four_bit_layers(load_model(str(model), four_bit=True).eval())["model.layers.0.mlp.up_proj"]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    layer(x)  # in evaluation mode and without a gradient, as in generation
    leaf = x.clone().requires_grad_()
    layer(leaf).square().sum().backward()
    expected = x.clone().requires_grad_()
    (expected @ dequantized(layer).T).square().sum().backward()
    assert torch.allclose(leaf.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_no_layer_in_4_bits_is_rearranged_for_a_product_without_gradients(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes.nn.modules

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    layers = four_bit_layers(load_model(str(model), four_bit=True))
    assert len(layers) == 14 and not any(layer.support_avx512bf16_for_cpu for layer in layers.values())


def test_a_run_learns_in_4_bits_and_its_checkpoint_is_an_ordinary_model(tmp_path: Path, model: Path) -> None:
    run = open_run(tmp_path, model, "trainer.total_training_steps=2")
    before = {name: layer.weight.clone() for name, layer in four_bit_layers(run.parts.policy.model).items()}
    run.fit()
    policy = run.parts.policy.model
    assert all(torch.equal(before[name], layer.weight) for name, layer in four_bit_layers(policy).items())
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    merged, ids = AutoModelForCausalLM.from_pretrained(folder), torch.arange(40).reshape(2, 20)
    base = load_model(str(model), four_bit=True)
    with torch.no_grad():
        trained, expected, start = merged(ids).logits, policy(ids).logits, base(ids).logits
    assert torch.allclose(trained, expected, atol=1e-4)
    assert float((expected - start).abs().max()) > 1e-3  # the adapters changed the model


@pytest.mark.slow
def test_a_resumed_run_gives_the_same_bits(tmp_path: Path, model: Path) -> None:
    open_run(tmp_path / "whole", model).fit()
    first = open_run(tmp_path / "parts", model, "trainer.total_training_steps=2")
    first.fit()
    open_run(tmp_path / "parts", model).fit()
    assert final_state(tmp_path / "whole" / "run") == final_state(tmp_path / "parts" / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{MODEL}.load_in_4bit=true"], "weights in 4 bits cannot be trained"),
        ([*KEYS, "actor_rollout_ref.actor.strategy=fsdp2"], "fsdp2 cannot shard it"),
        ([*KEYS, "trainer.device=mps"], "bitsandbytes has no kernels for MPS"),
        ([*KEYS, "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"], "state in 8 bits stays on the device"),
        (["trainer.device=mps", "actor_rollout_ref.rollout.name=vllm"], "vLLM does not run on MPS"),
        (["trainer.device=mps", "algorithm.use_kl_in_reward=true"], "float64, which MPS does not have"),
        (["trainer.device=mps", "algorithm.adv_estimator=gae"], "float64, which MPS does not have"),
        (["trainer.device=mps", "trainer.backend=ray"], "MPS is one device of one process"),
    ],
)
def test_what_does_not_go_together_is_said(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        load(None, overrides)


@pytest.mark.gpu
def test_a_run_on_a_gpu_learns_in_4_bits(tmp_path: Path, model: Path) -> None:
    run = open_run(tmp_path, model, "trainer.device=cuda", "trainer.total_training_steps=2")
    run.fit()
    assert {p.dtype for p in run.parts.policy.optimizer.masters.values()} == {torch.float32}
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    ids = torch.arange(40, device="cuda").reshape(2, 20)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, run.parts.policy.model(ids).logits, atol=0.1)
