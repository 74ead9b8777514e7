"""The WeightStore contract, run on each implementation."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.rollout.workers.cuda_weight_store import CudaWeights
from gspo.rollout.workers.weight_store import SharedWeights, WeightsFile, WeightStore, read_weights
from tests.contracts.weight_store import Description, WeightStoreContract, describe
from tests.distributed.ray.local_ray import cluster
from tests.rollout.workers.processes import shared_memory

__all__ = ["cluster"]


class TestSharedWeights(WeightStoreContract):
    @pytest.fixture
    def store(self) -> Iterator[SharedWeights]:
        before = shared_memory()
        store = SharedWeights()
        yield store
        store.close()
        assert shared_memory() == before

    def read(self, ref: WeightsFile) -> Description:
        return describe(read_weights(ref))

    def test_a_version_is_a_safetensors_file_until_it_is_discarded(self, store: SharedWeights) -> None:
        first, second = (store.publish(self.tensors(seed), seed) for seed in range(2))
        assert describe(load_file(first.path)) == describe(self.tensors(0))
        store.discard(first)
        assert not Path(first.path).exists() and Path(second.path).exists()
        store.close()
        assert not Path(second.path).exists()


class TestSharedWeightsInNamedFiles(TestSharedWeights):
    @pytest.fixture(autouse=True)
    def without_memfd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "memfd_create")


class TestCudaWeightsOnTheHost(WeightStoreContract):
    """Tensors in host memory, which CudaWeights publishes in shared memory."""

    @pytest.fixture
    def store(self) -> Iterator[CudaWeights]:
        store = CudaWeights()
        yield store
        store.close()

    def read(self, ref: WeightsFile) -> Description:
        assert isinstance(ref, WeightsFile)
        return describe(read_weights(ref))


@pytest.mark.gpu
class TestCudaWeights(WeightStoreContract):
    """Tensors in GPU memory, read by two other processes."""

    device = "cuda"

    @pytest.fixture(autouse=True)
    def readers(self) -> Iterator[None]:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        processes = [context.Process(target=_read_and_answer, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process in processes:
            process.start()
        self.pipes: list[Any] = [ours for ours, _ in pipes]
        yield
        for pipe in self.pipes:
            pipe.send_bytes(b"")
        for process in processes:
            process.join(30)
            assert process.exitcode == 0

    @pytest.fixture
    def store(self, readers: None) -> Iterator[CudaWeights]:
        before = torch.cuda.memory_allocated()
        store = CudaWeights()
        yield store
        store.close()
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == before

    def read(self, ref: Any) -> Description:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(ref))
        first, second = [pipe.recv() for pipe in self.pipes]
        assert first == second
        return first


def _read_and_answer(pipe: Any) -> None:
    while (message := pipe.recv_bytes()) != b"":
        pipe.send(describe(read_weights(pickle.loads(message))))


class TestObjectStore(WeightStoreContract):
    @pytest.fixture
    def store(self, cluster: Any) -> Iterator[WeightStore]:
        from gspo.distributed.ray.weight_store import ObjectStore

        store = ObjectStore()
        yield store
        store.close()

    def read(self, ref: Any) -> Description:
        import ray

        task: Any = ray.remote(lambda weights: describe(read_weights(weights)))
        return ray.get(task.remote(ref))


def test_weights_that_are_no_reference_are_read_as_they_are() -> None:
    tensors = {"a": torch.ones(2)}
    assert read_weights(tensors) is tensors and read_weights(None) is None
