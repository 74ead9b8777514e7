"""The RolloutEngine contract, run on each implementation that a CPU runs; vLLM's is in tests/vllm."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gspo.distributed.rank_engine import RankEngine
from gspo.distributed.rank_worker import RankWorker
from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.scripted import ScriptedEngine
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.fleet import Fleet
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.types import Group
from tests.contracts.rollout_engine import (
    DeterministicEngineContract,
    EngineContract,
    NewEngine,
    make_requests,
    scripted_answer,
    submit,
)
from tests.rollout.models import make_engine, make_model
from tests.rollout.native import plain_kernels
from tests.rollout.workers.thread_connection import NoWeights, ThreadConnection, no_weights

_MODEL = make_model()


def scripted(num_slots: int = 5, version: int = 0) -> ScriptedEngine:
    return ScriptedEngine(scripted_answer, num_slots=num_slots, version=version)


def native(num_slots: int = 5, **options: Any) -> RolloutEngine:
    return make_engine(copy.deepcopy(_MODEL), num_slots=num_slots, decode_chunk=2, **options)


class TestScriptedEngine(DeterministicEngineContract):
    @pytest.fixture
    def new_engine(self) -> NewEngine:
        return scripted


class TestNativeEngine(DeterministicEngineContract):
    @pytest.fixture
    def new_engine(self) -> NewEngine:
        return native

    def test_close_drops_what_is_in_flight(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(3)))
        engine.step()
        engine.close()
        engine.close()
        assert engine.num_in_flight == 0


class TestNativeEngineOnPages(TestNativeEngine):
    """Plain torch stands in for the GPU kernels."""

    @pytest.fixture
    def new_engine(self, monkeypatch: pytest.MonkeyPatch) -> NewEngine:
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
        monkeypatch.setitem(sys.modules, "gspo.kernels.triton_decode", plain_kernels)
        return lambda **options: native(paged=True, **options)


class FleetFixtures:
    """Fleets of two workers in threads over the engines of `make`."""

    kind: type[Fleet]
    make: Callable[..., RolloutEngine]

    @pytest.fixture
    def new_engine(self) -> Iterator[NewEngine]:
        with ExitStack() as stack:

            def new(version: int = 0) -> Fleet:
                fleet = self.kind(
                    lambda index: ThreadConnection(lambda: type(self).make(num_slots=3), index),
                    2,
                    weights=no_weights,
                    store=NoWeights(),
                    version=version,
                )
                stack.callback(fleet.close)
                return fleet

            yield new

    def test_killing_its_workers_ends_the_fleet_and_closing_it_twice_is_no_error(self, new_engine: NewEngine) -> None:
        fleet: Any = submit(new_engine(), make_requests(range(3)))
        connections = [slot.connection for slot in fleet.slots]
        fleet.kill()
        assert not any(connection.alive for connection in connections)
        fleet.close()
        fleet.close()
        assert fleet.num_in_flight == 0


class TestLockstepFleet(FleetFixtures, DeterministicEngineContract):
    kind, make = LockstepFleet, scripted


class TestLockstepFleetOfNativeEngines(FleetFixtures, DeterministicEngineContract):
    kind, make = LockstepFleet, native


class TestAsyncFleet(FleetFixtures, EngineContract):
    kind, make = AsyncFleet, scripted


class TestAsyncFleetOfNativeEngines(FleetFixtures, EngineContract):
    kind, make = AsyncFleet, native


class Rank(RankWorker):
    """One of `world_size` ranks in this process, with an engine and no models."""

    def __init__(self, engine: RolloutEngine, rank: int, world_size: int) -> None:
        super().__init__()
        self._engine = engine
        self._rank, self._world_size = rank, world_size

    @property
    def engine(self) -> RolloutEngine:
        return self._engine

    def _is_mine(self, number: int) -> bool:
        return number % self._world_size == self._rank

    def engine_publish(self, version: int) -> None:
        self.engine.load_weights(None, version)


class Ranks:
    """A RankGroup whose ranks are objects of this process."""

    def __init__(self, engines: list[RolloutEngine]) -> None:
        self.world_size = len(engines)
        self._ranks = [Rank(engine, rank, self.world_size) for rank, engine in enumerate(engines)]

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [rank.run(method.__name__, args) for rank in self._ranks]

    def stacks(self) -> str:
        return ""

    def close(self) -> None: ...


class TestRankEngine(DeterministicEngineContract):
    @pytest.fixture
    def new_engine(self) -> NewEngine:
        return lambda version=0: RankEngine(Ranks([scripted(3, version) for _ in range(2)]))


def test_an_engine_without_one_of_its_methods_cannot_be_made() -> None:
    class Incomplete(RolloutEngine):
        def submit(self, request: GroupRequest) -> None: ...

        def step(self) -> list[Group]:
            return []

    with pytest.raises(TypeError, match=r"abstract.*clear"):
        Incomplete()  # pyright: ignore
