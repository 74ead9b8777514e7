"""The optimizer with its state in host memory, on a GPU: the same bits, and less GPU memory."""

from __future__ import annotations

import gc

import pytest
import torch

from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.optim.offloaded import OffloadedOptimizer
from gspo.training.optim.pinned import PinnedFloats
from tests.checkpoint.test_resume import train as run
from tests.support.small_run import final_state
from tests.support.small_run import make_model as save_model
from tests.training.models import llama
from tests.training.test_offload import assert_same, offloaded, state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20


def train(model, optimizer: MasterOptimizer, lrs: list[float], bad: int | None = None) -> list:
    """A step a learning rate, of a loss whose gradients have the same bits each time.

    Nothing waits for the GPU in between, so that steps come close on each other.
    """
    generator = torch.Generator(device="cuda").manual_seed(7)
    results = []
    for index, lr in enumerate(lrs):
        for _ in range(2):
            loss = torch.zeros((), device="cuda")
            for p in model.parameters():
                aim = torch.randn(p.shape, device="cuda", generator=generator)
                loss = loss + (p.float() - aim).square().sum()
            loss = loss * (float("nan") if index == bad else 1.0)
            loss.backward()
        results.append(optimizer.step(lr, loss=loss.detach()))
    return [(result.applied, result.grad_norm if result.applied else None) for result in results]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("grad_clip", [None, 0.1])
def test_steps_have_the_bits_of_an_optimiser_that_keeps_its_state(dtype, fused, grad_clip):
    made = []
    for make in (MasterOptimizer, offloaded):
        model = llama().cuda().to(dtype)
        optimizer = make(model.named_parameters(), lr=1.0, grad_clip=grad_clip, fused=fused, weight_decay=0.1)
        made.append((train(model, optimizer, [1e-3, 5e-3, 2e-3, 1e-4], bad=2), on_host(state(optimizer))))
    (results, want), (got_results, got) = made
    assert results == got_results and [applied for applied, _ in results] == [True, True, False, True]
    assert_same(got, want)
    assert {float(t) for name, t in got.items() if name.startswith("step/")} == {3.0}


def test_large_pieces_that_wait_for_each_other_have_the_same_bits():
    """Enough bytes that copies still run when others are queued."""
    made = []
    for piece in (None, 1 << 20):
        model = llama(hidden_size=1024, intermediate_size=4096, vocab_size=8192).cuda().bfloat16()
        named = list(model.named_parameters())
        optimizer = (
            MasterOptimizer(named, lr=1.0) if piece is None else OffloadedOptimizer(named, lr=1.0, piece_elements=piece)
        )
        made.append((train(model, optimizer, [1e-3] * 6, bad=3), on_host(state(optimizer))))
    assert made[0][0] == made[1][0]
    assert_same(made[0][1], made[1][1])


@pytest.mark.parametrize("makers", [(MasterOptimizer, offloaded), (offloaded, MasterOptimizer)])
def test_each_kind_resumes_the_state_of_the_other(makers):
    first, second = makers
    whole = llama().cuda().bfloat16()
    kept = first(whole.named_parameters(), lr=1e-3)
    train(whole, kept, [1e-3, 2e-3])
    saved = on_host(kept.state_tensors())
    resumed = llama(seed=5).cuda().bfloat16()
    other = second(resumed.named_parameters(), lr=1e-3)
    other.load_state_tensors(saved)  # the masters among it are the weights
    assert train(whole, kept, [1e-3, 2e-3]) == train(resumed, other, [1e-3, 2e-3])
    assert_same(on_host(state(other)), on_host(state(kept)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_with_the_key_has_the_bits_of_one_without_and_each_resumes_the_other(tmp_path, monkeypatch, dtype):
    steps = []
    apply = OffloadedOptimizer._apply
    monkeypatch.setattr(OffloadedOptimizer, "_apply", lambda self, *given: (steps.append(self), apply(self, *given)))
    model = save_model(tmp_path / "model", hidden_size=128, num_attention_heads=4)
    words = ("trainer.deterministic=true", "trainer.device=cuda", f"actor_rollout_ref.model.dtype={dtype}")
    key = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    run(tmp_path / "kept", model, *words)
    assert not steps
    run(tmp_path / "there", model, *words, key, stop_after=2)
    assert steps
    del steps[:]
    run(tmp_path / "there", model, *words)
    assert not steps
    run(tmp_path / "back", model, *words, stop_after=2)
    run(tmp_path / "back", model, *words, key)
    assert steps
    want = final_state(tmp_path / "kept" / "run")
    assert final_state(tmp_path / "there" / "run") == want
    assert final_state(tmp_path / "back" / "run") == want


@pytest.mark.parametrize(("dtype", "bytes_spared"), [(torch.bfloat16, 12), (torch.float32, 8)])
def test_masters_and_moments_use_no_gpu_memory(dtype, bytes_spared):
    piece = 1 << 20
    held, peaks = [], []
    for make in (MasterOptimizer, OffloadedOptimizer):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = llama(hidden_size=1024, intermediate_size=4096, vocab_size=8192).cuda().to(dtype)
        settings = {} if make is MasterOptimizer else {"piece_elements": piece}
        optimizer = make(model.named_parameters(), lr=1e-3, **settings)
        train(model, optimizer, [1e-3])
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, [1e-3])
        held.append(torch.cuda.memory_allocated() - before)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        num = sum(p.numel() for p in model.parameters())
        del model, optimizer
    slots = 2 * 3 * 4 * piece
    assert held[0] - held[1] == pytest.approx(bytes_spared * num, abs=MIB)
    assert peaks[0] - peaks[1] > bytes_spared * num - slots - MIB


def test_host_memory_is_pinned_while_its_owner_lives():
    for _ in range(3):  # the same addresses may come again, which only works if they were let go
        memory = PinnedFloats(3 * MIB + 5, torch.device("cuda"))
        values = memory.values
        assert values.is_pinned() and values.shape == (3 * MIB + 5,) and not values.any()
        there = torch.arange(3 * MIB + 5, device="cuda", dtype=torch.float32)
        values.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        del memory
        gc.collect()
        assert not values.is_pinned() and torch.equal(values, there.cpu())
        del values


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.cpu().clone() for name, t in tensors.items()}
