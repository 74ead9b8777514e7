"""Weights in GPU memory: exports are released, also those of readers that were killed."""

from __future__ import annotations

import multiprocessing
import pickle
import time

import pytest
import torch
from torch.multiprocessing import reductions

from gspo.rollout.workers import cuda_weight_store
from gspo.rollout.workers.cuda_weight_store import CudaWeights, CudaWeightsRef
from gspo.rollout.workers.weight_store import read_weights


def test_a_discarded_version_has_no_readers_whether_they_closed_it_or_were_killed(monkeypatch, tmp_path):
    """As on a GPU, except that torch's counters are in a file of the test."""
    numbers = torch.from_file(str(tmp_path / "counters"), shared=True, size=8 + 10, dtype=torch.int64)
    numbers.fill_(7)
    free = iter(range(10))

    def export(tensor):
        """What torch's reduce_tensor gives for a tensor on a GPU, with the counter of a new reader."""
        place = next(free)
        numbers[8 + place] = 1
        return reductions.rebuild_cuda_tensor, (*(None,) * 11, b"/counters", place, None, False)

    monkeypatch.setattr(reductions, "reduce_tensor", export)
    monkeypatch.setattr(cuda_weight_store, "_COUNTER_FILES", str(tmp_path))
    ref, other = (CudaWeightsRef(torch.zeros(4, dtype=torch.uint8), {}) for _ in range(2))
    for pickled in (ref, other, ref):
        pickle.dumps(pickled)
    numbers[8] = 0  # the first reader has closed it, the third one was killed
    ref.release()
    assert numbers.tolist() == [*(7,) * 8, 0, 1, 0, *(7,) * 7]
    numbers[8] = 5
    ref.release()
    other.release()
    assert numbers.tolist() == [*(7,) * 8, 5, 0, 0, *(7,) * 7]


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
