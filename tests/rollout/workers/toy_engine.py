"""An engine without any library, for tests of worker processes: it starts at once and fails on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from gspo.rollout.engine import EngineError, RolloutEngine
from gspo.rollout.workers.worker import EngineSpec
from gspo.types import Group, Rollout


def make_spec(**options: Any) -> EngineSpec:
    return EngineSpec(
        kind="tests.rollout.workers.toy_engine:build",
        model="none",
        tokenizer="none",
        num_slots=1,
        max_length=8,
        eos_token_ids=(1,),
        pad_token_id=0,
        options=options,
    )


def build(spec: EngineSpec) -> ToyEngine:
    if spec.options.get("refuse"):
        raise EngineError("max_length=8 is too short")
    if spec.options.get("exit"):
        print("no such device", file=sys.stderr, flush=True)
        os._exit(3)
    return ToyEngine()


class Unpicklable(RuntimeError):
    """An error that pickle cannot rebuild: its constructor has other arguments than its `args`."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class ToyEngine(RolloutEngine):
    """`generate` returns its argument, unless that is a word that says what to do instead."""

    def __init__(self) -> None:
        self._requests: list[Any] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    def submit(self, request: Any) -> None:
        self._requests.append(request)

    def step(self) -> list[Group]:
        done, self._requests = self._requests, []
        rollout = Rollout((1,), (-0.5,), (1,), (0,), "stop", "1")
        return [Group(r.prompt, (rollout,) * r.n, r.submission, r.version) for r in done]

    def generate(self, requests: Any) -> Any:
        match requests:
            case ["hang"]:
                time.sleep(1000)
            case ["refuse"]:
                raise ValueError("prompt 'p': no tokens")
            case ["fail"]:
                raise Unpicklable("one", "two")
            case ["die"]:
                raise SystemExit(3)
            case ["child"]:
                return [subprocess.Popen(["sleep", "1000"]).pid]
        return list(requests)

    def unfinished(self) -> list[Any]:
        return list(self._requests)

    def clear(self) -> None:
        self._requests = []

    def load_weights(self, weights: Any, version: int) -> None: ...

    def close(self) -> None: ...
