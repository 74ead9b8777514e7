"""The device-side state of the running rows: last token, length, limits, and the tokens generated so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_TOP = 20  # best tokens of a position that are kept
TOP_RING = 128  # positions of a row whose best tokens are kept, the latest ones: they are read after every span


def upload(values: Any, device: torch.device, dtype: Any = np.int64) -> Tensor:
    """An array as a tensor on `device`. The host does not wait for the device: a GPU copies from pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class SlotStart:
    """How a row begins: `length` tokens are cached and `token` is the next to be fed, at position `length`."""

    token: int
    length: int
    first: int  # position whose output is response token 0: prompt length - 1
    last: int  # position whose output is the last token allowed
    key: int  # of the random numbers, see counter_noise.sequence_key
    stops: tuple[int, ...]


class Slots:
    """Tensors of `num_slots` rows, of which 0..B-1 run. Column p of `tokens` holds the output of position p.

    The host reads through `mark`: it notes how far the rows are once the device has done what was launched before, and
    `finished` and `read` wait for that moment only, while the device goes on with what was launched after it.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        self.device = device
        self.ints = torch.zeros(5, num_slots, dtype=torch.int64, device=device)
        self.token, self.length, self.first, self.last, self.key = self.ints.unbind(0)
        self.done = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.stops = torch.full((num_slots, 4), -1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(num_slots, max_length, dtype=torch.float32, device=device)
        self.top: tuple[Tensor, ...] | None = (
            None  # the best tokens of every position and their log-probs, once asked for
        )
        self._reader = _GpuReader(device) if device.type == "cuda" else _Reader()

    def mark(self, num_rows: int) -> None:
        """Note the state that rows 0..num_rows-1 will have after all that is launched; waits for nothing."""
        self._reader.mark(self.done[:num_rows], self.length[:num_rows])

    @property
    def num_marked(self) -> int:
        """Rows of the last mark; 0 without one."""
        return len(self._reader.marked()[0])

    def forget_mark(self) -> None:
        """Rows have changed places since the last mark: none of them counts as finished now."""
        self._reader.forget()

    def finished(self) -> list[int]:
        """The rows that were done at the last mark; [] without one."""
        return np.flatnonzero(self._reader.marked()[0]).tolist()

    def read(self, rows: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Lengths of these rows at the last mark, their tokens and their log-probs (valid up to the length)."""
        lengths = self._reader.marked()[1][rows]
        width = int(lengths.max())
        tokens, log_probs = self._reader.gather([self.tokens[:, :width], self.log_probs[:, :width]], rows)
        return lengths.tolist(), tokens, log_probs

    def place(self, first_row: int, starts: Sequence[SlotStart]) -> None:
        """Begin these sequences in consecutive rows."""
        rows = slice(first_row, first_row + len(starts))
        num_stops = max(len(s.stops) for s in starts)
        if num_stops > self.stops.shape[1]:
            wider = (0, num_stops - self.stops.shape[1])
            self.stops = torch.nn.functional.pad(self.stops, wider, value=-1)
        width = self.stops.shape[1]
        values = [[s.token, s.length, s.first, s.last, s.key, *s.stops, *[-1] * (width - len(s.stops))] for s in starts]
        placed = upload(values, self.device)
        self.ints[:, rows] = placed[:, :5].T
        self.stops[rows] = placed[:, 5:]
        self.done[rows] = False

    def park(self, first_row: int, last_row: int) -> None:
        """Mark rows first_row..last_row-1 as done, at position 0."""
        self.ints[:, first_row:last_row] = 0
        self.done[first_row:last_row] = True

    def record_top(self, logits: Tensor, temperature: Tensor | None) -> None:
        """Keep the best tokens of the first B rows and their log-probs at the position that `record` fills next."""
        num_rows = len(logits)
        scores = logits.float() if temperature is None else logits.float() / temperature
        best = scores.log_softmax(-1).topk(min(MAX_TOP, scores.shape[-1]), dim=-1)
        if self.top is None:
            shape = (len(self.tokens), TOP_RING, best.indices.shape[-1])
            self.top = tuple(torch.zeros(shape, dtype=t.dtype, device=self.device) for t in (best.indices, best.values))
        place = (self.length[:num_rows, None, None] % TOP_RING).expand(-1, 1, best.indices.shape[-1])
        for kept, new in zip(self.top, (best.indices, best.values)):
            kept[:num_rows].scatter_(1, place, new[:, None])

    def read_top(self, row: int, start: int, end: int, num: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The `num` best tokens of positions start..end-1 of a row, which are among its latest; () for none."""
        if not num or self.top is None:
            return ()
        ids, values = (part[0].tolist() for part in self._reader.gather([top[:, :, :num] for top in self.top], [row]))
        return tuple(tuple(zip(ids[at % TOP_RING], values[at % TOP_RING])) for at in range(start, end))

    def record(self, token: Tensor, log_prob: Tensor) -> None:
        """Append one new token to each of the first B rows and mark the rows that end with it.

        A row that is done does not advance: what it writes lies past its end and is never read.
        """
        num_rows = len(token)
        length, done = self.length[:num_rows], self.done[:num_rows]
        self.tokens[:num_rows].scatter_(1, length[:, None], token[:, None])
        self.log_probs[:num_rows].scatter_(1, length[:, None], log_prob[:, None])
        ends = (token[:, None] == self.stops[:num_rows]).any(1) | (length >= self.last[:num_rows])
        length += ~done
        done |= ends
        self.token[:num_rows] = token

    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy rows `sources` over rows `targets`."""
        self.ints[:, targets] = self.ints[:, sources]
        for rows in (self.done, self.stops, self.tokens, self.log_probs, *(self.top or ())):
            rows[targets] = rows[sources]


Marked = tuple[np.ndarray, np.ndarray]  # per row: whether it is done, its length


UNMARKED: Marked = (np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64))


class _Reader:
    """Reads the tensors of a CPU."""

    _marked = UNMARKED

    def forget(self) -> None:
        self._marked = UNMARKED

    def mark(self, done: Tensor, length: Tensor) -> None:
        self._marked = done.numpy().copy(), length.numpy().copy()

    def marked(self) -> Marked:
        return self._marked

    def gather(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[np.ndarray]:
        return [tensor[rows].numpy() for tensor in tensors]


class _GpuReader(_Reader):
    """Reads the tensors of a GPU, through pinned memory and a stream of its own, so that launched work goes on.

    Rows that are done no longer change, so reading them while later decode steps run gives what they had at the mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._event = device, torch.cuda.Stream(device), torch.cuda.Event()
        self._pending: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        self._marked, self._pending = UNMARKED, None

    def mark(self, done: Tensor, length: Tensor) -> None:
        self._pending = _to_host(done), _to_host(length)
        self._event.record()

    def marked(self) -> Marked:
        if self._pending is not None:
            self._event.synchronize()
            done, length = self._pending
            self._marked, self._pending = (done.numpy(), length.numpy()), None
        return self._marked

    def gather(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[np.ndarray]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            index = upload(rows, self._device)
            found = [_to_host(tensor[index]) for tensor in tensors]
        self._stream.synchronize()
        return [tensor.numpy() for tensor in found]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, complete when the current stream gets there."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
