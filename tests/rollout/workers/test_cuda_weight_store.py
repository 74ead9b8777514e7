"""Weights in GPU memory: exports are released, also those of readers that were killed."""

from __future__ import annotations

import multiprocessing
import pickle
import time

import pytest
import torch
from torch.multiprocessing import reductions

from gspo.rollout.workers.cuda_weight_store import CudaWeights, CudaWeightsRef
from gspo.rollout.workers.weight_store import read_weights


def test_every_export_of_a_version_is_released_once(monkeypatch):
    """As on a GPU, but that no tensor is exported: torch is asked for as many counters as there are readers."""
    free, released = iter(range(10)), []

    def export(tensor):
        """What torch's reduce_tensor gives for a tensor on a GPU."""
        place = next(free)
        return reductions.rebuild_cuda_tensor, (*(None,) * 11, b"counters", place, None, False)

    def release(handle, offset, device):
        released.append((handle, offset))

    monkeypatch.setattr(reductions, "reduce_tensor", export)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", release)
    ref, other = (CudaWeightsRef(torch.zeros(4, dtype=torch.uint8), {}) for _ in range(2))
    for pickled in (ref, other, ref):
        pickle.dumps(pickled)
    ref.release()
    assert released == [(b"counters", 0), (b"counters", 2)]
    ref.release()
    other.release()
    assert released == [(b"counters", i) for i in (0, 2, 1)]


def _die_reading(message: bytes, begun) -> None:
    tensors = read_weights(pickle.loads(message))
    begun.set()
    time.sleep(1000)
    del tensors


@pytest.mark.gpu
def test_a_reader_that_is_killed_takes_no_memory_with_it():
    context = multiprocessing.get_context("spawn")
    store, begun = CudaWeights(), context.Event()
    before = torch.cuda.memory_allocated()
    ref = store.publish({"a": torch.ones(1 << 20, device="cuda")}, 0)
    reader = context.Process(target=_die_reading, args=(pickle.dumps(ref), begun), daemon=True)
    reader.start()
    assert begun.wait(60)
    reader.kill()
    reader.join()
    store.discard(ref)
    del ref
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    store.close()
