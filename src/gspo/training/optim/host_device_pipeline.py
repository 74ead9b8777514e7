"""Pieces of host memory that are brought to a device, computed on there and brought back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NUM_SLOTS = 2  # pieces on the device at a time: one comes or is computed on while the other leaves


class HostDevicePipeline:
    """Carries pieces to one device and back; on a GPU the way there, the computation and the way back overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.cuda if device.type == "cuda" else torch.cpu  # whose streams do nothing
        where = {"device": device} if device.type == "cuda" else {}
        self._there, self._back = (self._backend.Stream(**where) for _ in range(2))

    def carry(self, pieces: Sequence[Sequence[Tensor]], compute: Callable[[int, list[Tensor]], None]) -> None:
        """Call `compute` with the number of each piece and its tensors on the device, where it changes them in place.

        All pieces have as many flat tensors. A GPU is not waited for: the host tensors hold the results after `wait`,
        and the current stream goes on when they do.
        """
        sizes = [max(len(host) for host in column) for column in zip(*pieces)]
        slots = [[torch.empty(size, device=self._device) for size in sizes] for _ in pieces[:NUM_SLOTS]]
        left: list[Any] = [None] * len(slots)  # what says that a slot's last piece is back
        here = self._backend.current_stream(self._device)
        self._there.wait_stream(here)  # which may still use the memory that the slots are in
        for index, hosts in enumerate(pieces):
            slot = index % NUM_SLOTS
            tensors = [buffer[: len(host)] for buffer, host in zip(slots[slot], hosts)]
            with self._backend.stream(self._there):
                if left[slot] is not None:
                    self._there.wait_event(left[slot])
                for tensor, host in zip(tensors, hosts):
                    tensor.copy_(host, non_blocking=True)
            here.wait_stream(self._there)
            compute(index, tensors)
            self._back.wait_stream(here)
            with self._backend.stream(self._back):
                for tensor, host in zip(tensors, hosts):
                    host.copy_(tensor, non_blocking=True)
                left[slot] = self._back.record_event()
        here.wait_stream(self._back)  # before the memory of the slots, freed here, is used again

    def wait(self) -> None:
        """Return when the host tensors are what the last `carry` made of them."""
        self._backend.synchronize(self._device)
