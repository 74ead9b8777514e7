"""Tensors sent through Ray as numpy arrays, which it stores and delivers with one copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from ray.util import register_serializer
from torch import Tensor

Packed = tuple[np.ndarray, str, tuple[int, ...]]  # bytes, type, shape


def pack(tensor: Tensor) -> Packed:
    """A tensor's bytes in host memory, with its type and shape."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def unpack(packed: Packed) -> Tensor:
    """A new tensor in host memory."""
    data, dtype, shape = packed
    return view((data.copy(), dtype, shape))


def view(packed: Packed) -> Tensor:
    """A tensor over the packed bytes. They may belong to Ray: read, do not write."""
    data, dtype, shape = packed
    if not data.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory
        return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def send_as_arrays() -> None:
    """Make this process send tensors packed. Ray's default, pickling through torch.save, is several times slower."""
    register_serializer(Tensor, serializer=pack, deserializer=unpack)
