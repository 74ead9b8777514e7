"""Weights in Ray's object store: a version is put once and read in place by every worker of a machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor


class ObjectWeights(Mapping[str, Tensor]):
    """Named tensors as plain arrays, which Ray hands over without a copy. Tensors of it may be read, not written."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._arrays: dict[str, tuple[np.ndarray, str, tuple[int, ...]]] = {}
        for name, tensor in tensors.items():
            flat = tensor.detach().to("cpu").contiguous().flatten()
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._arrays[name] = (flat.view(torch.uint8).numpy(), dtype, tuple(tensor.shape))

    def __getitem__(self, name: str) -> Tensor:
        data, dtype, shape = self._arrays[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the memory is shared and not to be written is the point
            return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class ObjectStore:
    """A WeightStore in the cluster: `publish` gives an object reference, which Ray resolves on the worker's side."""

    def __init__(self) -> None:
        self._held: set[Any] = set()

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> Any:
        """Copy the tensors into the object store; they may change as soon as this returns."""
        ref = ray.put(ObjectWeights(tensors))
        self._held.add(ref)
        return ref

    def discard(self, ref: Any) -> None:
        """Let Ray free a version once its readers are done."""
        self._held.discard(ref)

    def close(self) -> None:
        self._held.clear()
