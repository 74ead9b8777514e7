"""Fleets whose workers, in threads, die, hang and fail where a test says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from gspo.rollout.engine import RolloutEngine
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.types import Group, Prompt
from tests.rollout.models import drain, make_engine, make_model, make_request
from tests.rollout.workers.thread_connection import NoWeights, ThreadConnection, no_weights

MODEL = make_model()
# Called with the number of a worker, in order of their start, and of its engine's step; may raise or wait.
Fault = Callable[[int, int], None]


class Faulty:
    """An engine with a fault before some of its steps."""

    def __init__(self, engine: RolloutEngine, life: int, fault: Fault) -> None:
        self._engine, self._life, self._fault = engine, life, fault
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Group]:
        self._num_steps += 1
        self._fault(self._life, self._num_steps)
        return self._engine.step()


class FaultyFleet:
    """A fleet of `num_workers` faulty workers, its messages, its connections and its weight store."""

    def __init__(
        self,
        kind: type[LockstepFleet] | type[AsyncFleet],
        make: Callable[[], RolloutEngine],
        fault: Fault,
        **options: Any,
    ) -> None:
        self.messages: list[str] = []
        self.store = NoWeights()
        self.connections: list[ThreadConnection] = []
        self._make, self._fault = make, fault
        self.fleet: Any = kind(
            self._connect,
            options.pop("num_workers", 2),
            weights=no_weights,
            store=self.store,
            notify=self.messages.append,
            **options,
        )

    def _connect(self, index: int) -> ThreadConnection:
        life = len(self.connections)
        connection = ThreadConnection(lambda: Faulty(self._make(), life, self._fault), index)  # pyright: ignore
        self.connections.append(connection)
        return connection


def script(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
    return ScriptedAnswer(tuple(range(5, 7 + (submission * 5 + index * 3) % 9)), text=f"{prompt.uid}/{index}")


def scripted() -> ScriptedEngine:
    return ScriptedEngine(script, num_slots=4)


def native() -> RolloutEngine:
    return make_engine(copy.deepcopy(MODEL), num_slots=4, decode_chunk=2)


def no_fault(life: int, step: int) -> None: ...


def run(fleet: Any) -> list[list[Group]]:
    """Run a fleet through three versions; the groups that every step returned."""
    steps: list[list[Group]] = []
    for version in range(3):
        for i in range(4):
            fleet.submit(make_request(version * 4 + i, n=1 + i % 3, version=version))
        steps += [fleet.step(), fleet.step()]
        fleet.load_weights(None, version + 1)
    while fleet.num_in_flight:
        steps.append(fleet.step())
    return steps


def finish(world: FaultyFleet, count: int) -> dict[int, Group]:
    """Step until all groups came out, each once."""
    groups = drain(world.fleet, limit=5000)
    assert sorted(g.submission for g in groups) == list(range(count))
    return {g.submission: g for g in groups}
