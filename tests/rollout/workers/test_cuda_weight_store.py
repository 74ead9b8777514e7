"""Weights in GPU memory, opened by another process."""

from __future__ import annotations

import multiprocessing
import pickle
import time

import pytest
import torch
from torch.multiprocessing import reductions

from gspo.rollout.workers.cuda_weight_store import CudaWeights, CudaWeightsRef
from gspo.rollout.workers.weight_store import WeightsFile, read_weights

SHAPES = {"a": (3, 5), "scalar": (), "b": (7,), "empty": (0, 4)}


def _tensors(device: str, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
    return {n: torch.randn(s, device=device).to(t) for (n, s), t in zip(SHAPES.items(), types)}


def _serve(pipe) -> None:
    while (message := pipe.recv_bytes()) != b"":
        ref = pickle.loads(message)
        with read_weights(ref) as tensors:
            assert tensors is not None
            pipe.send({name: t.cpu().float().tolist() for name, t in tensors.items()})
        del ref, tensors


def test_tensors_of_the_host_go_through_its_memory():
    store, tensors = CudaWeights(), _tensors("cpu", 0)
    ref = store.publish(tensors, 1)
    assert isinstance(ref, WeightsFile)
    with read_weights(ref) as found:
        assert found is not None and all(torch.equal(found[name], t) for name, t in tensors.items())
    store.discard(ref)
    store.close()


def test_every_export_of_a_version_is_let_go_of_once(monkeypatch):
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
    store = CudaWeights()
    refs = [CudaWeightsRef(torch.zeros(4, dtype=torch.uint8), {}) for _ in range(2)]
    for ref in refs:
        store._held[id(ref)] = ref
        pickle.dumps(ref)
        pickle.dumps(ref)
    store.discard(refs[0])
    assert released == [(b"counters", 0), (b"counters", 1)]
    store.close()
    store.close()
    assert released == [(b"counters", i) for i in range(4)]


def _die_reading(message: bytes, begun) -> None:
    with read_weights(pickle.loads(message)):
        begun.set()
        time.sleep(1000)


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


@pytest.mark.gpu
def test_several_processes_read_several_versions_and_publishing_is_a_snapshot():
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    readers = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
    for reader in readers:
        reader.start()
    store = CudaWeights()
    for version in range(3):
        tensors = _tensors("cuda", version)
        expected = {name: t.cpu().float().tolist() for name, t in tensors.items()}
        ref = store.publish(tensors, version)
        for tensor in tensors.values():
            tensor.zero_()
        for ours, _ in pipes:
            ours.send_bytes(pickle.dumps(ref))
        assert [ours.recv() for ours, _ in pipes] == [expected, expected]
        store.discard(ref)
    for ours, _ in pipes:
        ours.send_bytes(b"")
    for reader in readers:
        reader.join(30)
        assert reader.exitcode == 0
    store.close()
