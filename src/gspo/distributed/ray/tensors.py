"""Tensors on their way through Ray: as plain arrays, which it stores and hands over in one copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from ray.util import register_serializer
from torch import Tensor

Packed = tuple[np.ndarray, str, tuple[int, ...]]  # bytes, type, shape


def pack(tensor: Tensor) -> Packed:
    """A tensor's numbers, from whatever device, without its gradient."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def unpack(packed: Packed) -> Tensor:
    """A tensor in host memory of its own."""
    data, dtype, shape = packed
    return view((data.copy(), dtype, shape))


def view(packed: Packed) -> Tensor:
    """A tensor that looks into the packed bytes; they may be Ray's own, to be read and not written."""
    data, dtype, shape = packed
    if not data.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not to be written
        return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def send_as_arrays() -> None:
    """Let this process send tensors packed. Ray would pickle them through torch.save, several times slower."""
    register_serializer(Tensor, serializer=pack, deserializer=unpack)
