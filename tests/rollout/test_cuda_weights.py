"""Weights in GPU memory, opened by another process."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest
import torch

from gspo.rollout.cuda_weights import CudaWeights
from gspo.rollout.weights import WeightsFile, read_weights

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
