"""Decode steps captured as CUDA graphs, one for each batch size and kind of sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.paged_model import PagedModel
from gspo.rollout.native.slots import Slots

log = logging.getLogger(__name__)

WARM_UPS = 2
Step = Callable[[int, SamplingParams], None]  # draws one token for this many rows


class DecodeGraphs:
    """Replays `step` from graphs that are captured at first use; runs it plainly where it cannot be captured."""

    def __init__(self, step: Step, paged: PagedModel, slots: Slots) -> None:
        self._step, self._paged, self._slots = step, paged, slots
        self._graphs: dict[tuple[int, SamplingParams], torch.cuda.CUDAGraph | None] = {}
        self._memory: Any = None  # shared by all graphs
        self._stops_address = slots.stops.data_ptr()
        paged.on_free.append(self._drop)

    def run(self, num_rows: int, params: SamplingParams) -> None:
        """Draw one token for each of the first `num_rows` rows."""
        graph = self._graph(num_rows, params) if self._paged.graphs else None
        if graph is None:
            self._step(num_rows, params)
        else:
            graph.replay()

    def _graph(self, num_rows: int, params: SamplingParams) -> torch.cuda.CUDAGraph | None:
        key = (num_rows, params)
        if key not in self._graphs:
            self._graphs[key] = self._capture(num_rows, params)
        return self._graphs[key]

    def _drop(self) -> None:
        self._graphs, self._memory = {}, None

    def follow_stops(self) -> None:
        """Drop every graph when the table of stop tokens was widened and so has a new address."""
        if self._slots.stops.data_ptr() != self._stops_address:
            self._stops_address = self._slots.stops.data_ptr()
            self._graphs = {}

    def _capture(self, num_rows: int, params: SamplingParams) -> torch.cuda.CUDAGraph | None:
        """A graph of the step; None when it cannot be captured."""
        done = self._slots.done
        before = done.clone()
        done.fill_(True)  # rows that are done do not advance, so warming up changes nothing
        try:
            try:
                self._warm_up(num_rows, params)
            except Exception as error:
                if not self._paged.compiled:
                    raise
                self._paged.stop_compiling(f"{type(error).__name__}: {error}")
                self._warm_up(num_rows, params)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._memory):
                    self._step(num_rows, params)
            except RuntimeError as error:
                log.warning("the decode step is not captured as a CUDA graph: %s", error)
                self._paged.graphs = False
                return None
            self._memory = graph.pool()
            return graph
        finally:
            done.copy_(before)

    def _warm_up(self, num_rows: int, params: SamplingParams) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step(num_rows, params)
        torch.cuda.current_stream().wait_stream(stream)


def batch_sizes(num_slots: int) -> list[int]:
    """Batch sizes that are captured: 2, 4, 8, 16, 24, 32, 48 … up to one that holds `num_slots` rows."""
    sizes = [2, 4, 8]
    while sizes[-1] < num_slots:
        last = sizes[-1]
        is_power = last & (last - 1) == 0
        sizes.append(last * 3 // 2 if is_power and last >= 16 else 1 << last.bit_length())
    return [s for s in sizes if s < num_slots] + [next(s for s in sizes if s >= num_slots)]
