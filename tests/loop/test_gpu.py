"""A run on a GPU with deterministic algorithms: stopped and resumed it is the run that was never stopped, to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.test_resume import train
from tests.loop.runs import rows
from tests.loop.supervised_runs import train as train_sft
from tests.support.small_run import final_state, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_deterministic_run_goes_on_to_the_same_bits(tmp_path, dtype):
    model = make_model(tmp_path / "model", hidden_size=128, num_attention_heads=4)
    words = ("trainer.deterministic=true", "trainer.device=cuda", f"actor_rollout_ref.model.dtype={dtype}")
    train(tmp_path / "whole", model, *words)
    assert train(tmp_path / "parts", model, *words, stop_after=2)["steps"] == 2
    assert train(tmp_path / "parts", model, *words)["steps"] == 4
    assert final_state(tmp_path / "parts" / "run") == final_state(tmp_path / "whole" / "run")


def test_a_deterministic_supervised_run_goes_on_to_the_same_bits(tmp_path):
    model = make_model(tmp_path / "model", hidden_size=128, num_attention_heads=4)
    words = ("trainer.deterministic=true", "trainer.device=cuda")
    train_sft(tmp_path / "whole", model, *words)
    assert train_sft(tmp_path / "parts", model, *words, stop_after=2)["steps"] == 2
    assert train_sft(tmp_path / "parts", model, *words)["steps"] == 4
    assert final_state(tmp_path / "parts" / "run") == final_state(tmp_path / "whole" / "run")


def test_supervised_losses_are_those_of_a_cpu(tmp_path):
    model = make_model(tmp_path / "model", hidden_size=128, num_attention_heads=4)
    lr = "actor_rollout_ref.actor.optim.lr=1e-4"
    for device in ("cpu", "cuda"):
        train_sft(tmp_path / device, model, f"trainer.device={device}", lr)
    for name in ("train/loss", "val/loss"):
        on_cpu, on_gpu = ([row[name] for row in rows(tmp_path / d) if name in row] for d in ("cpu", "cuda"))
        assert on_cpu and on_gpu == pytest.approx(on_cpu, rel=0.02)
