"""When decode steps are captured, replayed, captured again and run plainly. CUDA itself is replaced: it needs a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.graphs import DecodeGraphs
from gspo.rollout.native.paged_model import PagedModel
from gspo.rollout.native.slots import Slots, SlotStart

GREEDY, SAMPLED = SamplingParams(8, temperature=0.0), SamplingParams(8)


class Cuda:
    """Graphs whose capture runs nothing but notes the step; `fails` makes a capture fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        self.num_captured = 0
        self.replayed: list[int] = []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, double in {
            "CUDAGraph": self._graph,
            "graph": self._capture,
            "Stream": lambda: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda: stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, double)

    def _graph(self) -> Any:
        number = self.num_captured
        return SimpleNamespace(replay=lambda: self.replayed.append(number), pool=lambda: "pool")

    @contextlib.contextmanager
    def _capture(self, graph: Any, pool: Any) -> Any:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield
        self.num_captured += 1


class World:
    """Graphs over a step that notes its calls, and whether any row was not done during them."""

    def __init__(self, compiled: bool = False) -> None:
        self.paged: Any = SimpleNamespace(graphs=True, compiled=compiled, on_free=[])
        self.paged.compiled_or_not = lambda action: PagedModel.compiled_or_not(self.paged, action)
        self.slots = Slots(4, 16, torch.device("cpu"))
        self.calls: list[int] = []
        self.advanced = False
        self.graphs = DecodeGraphs(self._step, self.paged, self.slots)

    def _step(self, num_rows: int, params: SamplingParams) -> None:
        if self.paged.compiled:
            raise RuntimeError("no such header")
        self.calls.append(num_rows)
        self.advanced |= not bool(self.slots.done.all())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_step_is_captured_once_for_each_batch_size_and_sampling_and_then_replayed(cuda: Cuda) -> None:
    world = World()
    for num_rows, params in [(2, GREEDY), (2, GREEDY), (4, GREEDY), (2, SAMPLED), (4, GREEDY)]:
        world.graphs.run(num_rows, params)
    assert cuda.num_captured == 3 and cuda.replayed == [0, 0, 1, 2, 1]
    assert not world.advanced, "no row advances while a step is warmed up and captured"
    assert not world.slots.done.any()


def test_graphs_are_captured_again_when_the_pages_or_the_stop_tokens_have_moved(cuda: Cuda) -> None:
    world = World()
    world.graphs.run(2, GREEDY)
    world.graphs.follow_stops()
    world.graphs.run(2, GREEDY)
    assert cuda.num_captured == 1
    world.slots.place(0, [SlotStart(5, 1, 1, 4, 0, stops=tuple(range(9)))])
    world.graphs.follow_stops()
    world.graphs.run(2, GREEDY)
    assert cuda.num_captured == 2
    for call in world.paged.on_free:
        call()
    world.graphs.run(2, GREEDY)
    assert cuda.num_captured == 3


def test_a_step_that_cannot_be_captured_runs_plainly_from_then_on(cuda: Cuda, caplog: Any) -> None:
    world = World()
    cuda.fails = True
    world.graphs.run(2, GREEDY)
    warm_ups = len(world.calls) - 1
    world.graphs.run(4, GREEDY)
    assert world.calls == [2] * warm_ups + [2, 4] and cuda.replayed == []
    assert not world.paged.graphs and "not captured as a CUDA graph" in caplog.text


def test_a_compiled_step_that_fails_is_captured_uncompiled(cuda: Cuda, caplog: Any) -> None:
    world = World(compiled=True)
    world.graphs.run(2, GREEDY)
    assert "no such header" in caplog.text and not world.paged.compiled and cuda.replayed == [0]


def test_without_graphs_the_step_runs_plainly(cuda: Cuda) -> None:
    world = World()
    world.paged.graphs = False
    world.graphs.run(2, GREEDY)
    assert world.calls == [2] and cuda.num_captured == 0
