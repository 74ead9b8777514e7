"""When decode steps and prefills are captured, replayed, captured again and run plainly. CUDA itself is replaced: it needs a GPU."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gspo.kernels.sizes import PAGE
from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.graphs import DecodeGraphs, PrefillGraphs, prefill_sizes
from gspo.rollout.native.paged_model import PagedModel
from gspo.rollout.native.pages import LengthsNeeded
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
        self.paged: Any = SimpleNamespace(graphs=True, compiled=compiled)
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


def test_graphs_are_captured_again_when_the_stop_tokens_have_moved(cuda: Cuda) -> None:
    world = World()
    world.graphs.run(2, GREEDY)
    world.graphs.follow_stops()
    world.graphs.run(2, GREEDY)
    assert cuda.num_captured == 1
    world.slots.place(0, [SlotStart(5, 1, 1, 4, 0, stops=tuple(range(9)))])
    world.graphs.follow_stops()
    world.graphs.run(2, GREEDY)
    assert cuda.num_captured == 2


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


class Prefills:
    """A model that notes what it prefills; a replayed graph prefills what its inputs hold then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.graphs = torch.device("cpu"), True
        self.needs_lengths = False
        self.runs: list[list[tuple[list[int], list[int], list[int]]]] = []  # contexts: tokens, positions, places
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, double in {
            "CUDAGraph": lambda: SimpleNamespace(pool=lambda: "pool"),
            "graph": self._capture,
            "Stream": lambda: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda: stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, double)

    def compiled_or_not(self, action: Any) -> None:
        action()

    @contextlib.contextmanager
    def _capture(self, graph: Any, pool: Any) -> Any:
        yield
        inputs = self.last
        graph.replay = lambda: self.run_prefill(*inputs)
        self.runs.clear()

    def run_prefill(self, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> None:
        if self.needs_lengths:
            raise LengthsNeeded
        self.last = tokens, positions, packed
        starts = packed.starts.tolist()
        assert starts[-1] == len(tokens) and all(b - a <= packed.longest for a, b in pairwise(starts))
        parts = [
            (tokens[a:b].tolist(), positions[a:b].tolist(), packed.places[a:b].tolist()) for a, b in pairwise(starts)
        ]
        self.runs.append([part for part in parts if part[0]])


def test_contexts_are_packed_into_a_captured_size_and_the_rest_is_written_to_page_0(monkeypatch) -> None:
    model: Any = Prefills(monkeypatch)
    graphs = PrefillGraphs(model, max_tokens=512, max_length=60)
    contexts, pages = [list(range(5, 25)), [7, 8, 9]], [[3, 1], [4]]
    for _ in range(2):
        assert graphs.run(contexts, pages)
    first, again = model.runs
    assert first == again
    assert first[0] == (contexts[0], list(range(20)), [*range(3 * PAGE, 4 * PAGE), *range(PAGE, PAGE + 4)])
    assert first[1] == (contexts[1], [0, 1, 2], [4 * PAGE, 4 * PAGE + 1, 4 * PAGE + 2])
    padding = first[2:]
    assert sum(len(tokens) for tokens, _, _ in padding) == 128 - 23
    assert {place for _, _, places in padding for place in places} == {0}
    assert all(positions == list(range(len(tokens))) for tokens, positions, _ in padding)


def test_contexts_that_are_too_long_or_too_many_are_not_captured(monkeypatch) -> None:
    graphs = PrefillGraphs(cast("Any", Prefills(monkeypatch)), max_tokens=256, max_length=60)
    assert not graphs.run([[5] * 40] * 7, [[1, 2, 3]] * 7)
    assert not graphs.run([[5]] * 33, [[1]] * 33)
    assert graphs.run([[5] * 40] * 6, [[1, 2, 3]] * 6)


def test_a_model_whose_lengths_the_host_must_know_is_prefilled_plainly(monkeypatch) -> None:
    model: Any = Prefills(monkeypatch)
    model.needs_lengths = True
    graphs = PrefillGraphs(model, max_tokens=256, max_length=60)
    assert not graphs.run([[5, 6]], [[1]]) and model.runs == []
    model.needs_lengths = False
    assert not graphs.run([[5, 6]], [[1]]), "it is tried once"


def test_prefill_sizes_waste_at_most_half() -> None:
    sizes = prefill_sizes(8192)
    assert sizes[:6] == [128, 256, 384, 512, 768, 1024] and sizes[-1] == 8192
    assert prefill_sizes(100) == [128] and prefill_sizes(5000)[-1] == 6144
