"""What every WeightStore must do. A test class derives from WeightStoreContract and gives it a store and a reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gspo.rollout.workers.weight_store import WeightStore

Description = dict[str, tuple[str, tuple[int, ...], Any]]


def describe(tensors: Mapping[str, Tensor] | None) -> Description:
    """Types, shapes and numbers of tensors, in a form that can be compared and pickled."""
    assert tensors is not None
    return {n: (str(t.dtype), tuple(t.shape), t.cpu().double().tolist()) for n, t in tensors.items()}


class WeightStoreContract(ABC):
    """`store` is a fixture; `read(ref)` describes the tensors as a worker finds them."""

    device = "cpu"

    @abstractmethod
    def read(self, ref: Any) -> Description: ...

    def tensors(self, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        made = {
            "matrix": torch.randn(5, 7),
            "half": torch.randn(3).to(torch.bfloat16),
            "flags": torch.tensor([True, False, True]),
            "transposed": torch.randn(4, 6).T,
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2.5, dtype=torch.float16),
        }
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def test_a_reader_finds_the_tensors_as_they_were_when_published(self, store: WeightStore) -> None:
        tensors = self.tensors(0)
        expected = describe(tensors)
        ref = store.publish(tensors, 7)
        for tensor in tensors.values():
            tensor.zero_()
        assert self.read(ref) == expected

    def test_versions_are_kept_apart_until_they_are_discarded(self, store: WeightStore) -> None:
        versions = [self.tensors(seed) for seed in range(3)]
        refs = [store.publish(tensors, number) for number, tensors in enumerate(versions)]
        assert [self.read(ref) for ref in refs] == [describe(tensors) for tensors in versions]
        store.discard(refs[1])
        assert self.read(refs[0]) == describe(versions[0]) and self.read(refs[2]) == describe(versions[2])

    def test_close_may_come_twice(self, store: WeightStore) -> None:
        store.publish(self.tensors(0), 1)
        store.close()
        store.close()
