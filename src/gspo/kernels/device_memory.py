"""Tensors to a GPU without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on the device. A copy from pageable memory would wait for all work given to a GPU before."""
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
