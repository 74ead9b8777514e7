"""Weights in Ray's object store: a version is stored once and read in place by every worker of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from torch import Tensor

from gspo.distributed.ray.tensors import pack, view


class ObjectWeights(Mapping[str, Tensor]):
    """Packed named tensors, which Ray delivers without a copy. They are read-only."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._packed = {name: pack(tensor) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return view(self._packed[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


class ObjectStore:
    """A WeightStore in the cluster. `publish` returns an object reference, which Ray resolves in the worker."""

    def __init__(self) -> None:
        self._held: set[Any] = set()

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> Any:
        """Copy the tensors into the object store; they may change as soon as this returns."""
        ref = ray.put(ObjectWeights(tensors))
        self._held.add(ref)
        return ref

    def discard(self, ref: Any) -> None:
        """Release a version; Ray frees it after its last reader."""
        self._held.discard(ref)

    def close(self) -> None:
        self._held.clear()
