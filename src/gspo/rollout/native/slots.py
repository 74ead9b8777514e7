"""The device-side state of the running rows: last token, length, limits, and the tokens generated so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """Tensors of `num_slots` rows, of which 0..B-1 run. Column p of `tokens` holds the output of position p."""

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        self.device = device
        self.ints = torch.zeros(5, num_slots, dtype=torch.int64, device=device)
        self.token, self.length, self.first, self.last, self.key = self.ints.unbind(0)
        self.done = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.stops = torch.full((num_slots, 4), -1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(num_slots, max_length, dtype=torch.float32, device=device)

    def place(self, first_row: int, starts: Sequence[SlotStart]) -> None:
        """Begin these sequences in consecutive rows."""
        rows = slice(first_row, first_row + len(starts))
        ints = [[s.token, s.length, s.first, s.last, s.key] for s in starts]
        self.ints[:, rows] = torch.tensor(ints, dtype=torch.int64).T.to(self.device)
        num_stops = max(len(s.stops) for s in starts)
        if num_stops > self.stops.shape[1]:
            wider = (0, num_stops - self.stops.shape[1])
            self.stops = torch.nn.functional.pad(self.stops, wider, value=-1)
        width = self.stops.shape[1]
        stops = [[*s.stops, *[-1] * (width - len(s.stops))] for s in starts]
        self.stops[rows] = torch.tensor(stops, dtype=torch.int64).to(self.device)
        self.done[rows] = False

    def park(self, first_row: int, last_row: int) -> None:
        """Mark rows first_row..last_row-1 as done, at position 0."""
        self.ints[:, first_row:last_row] = 0
        self.done[first_row:last_row] = True

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
        for rows in (self.done, self.stops, self.tokens, self.log_probs):
            rows[targets] = rows[sources]
