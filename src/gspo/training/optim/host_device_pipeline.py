"""Computation on a device over host memory, piece by piece.

    upload stream    piece 0 │ piece 1 │ waits until slot 0 is free │ piece 2 …
    current stream           │ compute 0 │ compute 1 …
    download stream                      │ piece 0 │ piece 1 …

NUM_SLOTS pieces are on the device at a time. The host thread waits for none of it until `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NUM_SLOTS = 2  # one is uploaded or computed on while the other is downloaded


class HostDevicePipeline:
    """Moves pieces to one device and back. On a GPU upload, computation and download overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.cuda if device.type == "cuda" else torch.cpu  # torch.cpu has streams that do nothing
        where = {"device": device} if device.type == "cuda" else {}
        self._upload, self._download = (self._backend.Stream(**where) for _ in range(2))

    def run(self, pieces: Sequence[Sequence[Tensor]], compute: Callable[[int, list[Tensor]], None]) -> None:
        """Call `compute` with the index of each piece and its tensors on the device, which it changes in place.

        Each piece has the same number of flat tensors. The host tensors hold the results after `wait`; later work of
        the current stream waits for them.
        """
        sizes = [max(len(host) for host in column) for column in zip(*pieces)]
        slots = [[torch.empty(size, device=self._device) for size in sizes] for _ in pieces[:NUM_SLOTS]]
        left: list[Any] = [None] * len(slots)  # events: a slot's last piece is downloaded
        here = self._backend.current_stream(self._device)
        self._upload.wait_stream(here)  # it may still use the slots' memory
        for index, hosts in enumerate(pieces):
            slot = index % NUM_SLOTS
            tensors = [buffer[: len(host)] for buffer, host in zip(slots[slot], hosts)]
            with self._backend.stream(self._upload):
                if left[slot] is not None:
                    self._upload.wait_event(left[slot])
                for tensor, host in zip(tensors, hosts):
                    tensor.copy_(host, non_blocking=True)
            here.wait_stream(self._upload)
            compute(index, tensors)
            self._download.wait_stream(here)
            with self._backend.stream(self._download):
                for tensor, host in zip(tensors, hosts):
                    host.copy_(tensor, non_blocking=True)
                left[slot] = self._download.record_event()
        here.wait_stream(self._download)  # before the slots' memory, freed here, is reused

    def wait(self) -> None:
        """Return when the host tensors hold the results of the last `run`."""
        self._backend.synchronize(self._device)
