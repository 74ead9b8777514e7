"""The producer: the dynamic sampler in a thread of its own, at work on the next batches while the trainer trains.

It is the sampler to the loop: the same calls, the same order, the same answers. Between them it lets the sampler work
ahead, as far as its staleness budget allows. All calls of the sampler are made in the producer's thread; with a budget
of 0 there is nothing to do ahead, and what happens is what happens without a producer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from gspo.rollout.workers.connection import FleetClosed
from gspo.sampling.dynamic import DynamicSampler, Record
from gspo.sampling.group_json import pack_group, unpack_group
from gspo.sampling.step_counts import SamplingCounts
from gspo.types import Group

Job = tuple[Callable[[], Any], Future[Any]]


class Producer:
    """Runs a sampler that `make(record)` builds. Calls come from one thread, the trainer's.

    The fate of a group is told to `record` when the batch is handed out in whose making it was decided, so that the
    account of a step is complete when the step is, and a checkpoint holds what has not been told yet.
    """

    def __init__(self, make: Callable[[Record], DynamicSampler], record: Record | None = None) -> None:
        self._record = record or (lambda group, fate, version: None)
        self._untold: list[tuple[Group, str, int]] = []
        self._sampler = make(lambda group, fate, version: self._untold.append((group, fate, version)))
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # met while working ahead
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def version(self) -> int:
        return self._sampler.version

    def next_batch(self) -> tuple[list[Group], SamplingCounts]:
        """Wait for the next batch; raises what `DynamicSampler.next_batch` raises."""
        batch, untold = self._call(self._produce)
        for group, fate, version in untold:
            self._record(group, fate, version)
        return batch

    def release(self, groups: list[Group]) -> None:
        """Say that the last batch has been trained on and the new weights are live; returns at once."""
        self._post(lambda: self._sampler.release(groups))

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: groups in flight with the tokens they have so far, groups that wait."""
        return self._call(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call(lambda: self._load(state))

    def close(self) -> None:
        """End the thread. The engine must have been closed, so that no step of it is waited for."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _produce(self) -> tuple[tuple[list[Group], SamplingCounts], list[tuple[Group, str, int]]]:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        batch = self._sampler.next_batch()
        untold, self._untold = self._untold, []
        return batch, untold

    def _state(self) -> dict[str, Any]:
        state = self._sampler.state_dict()
        untold = [[pack_group(group), fate, version] for group, fate, version in self._untold]
        return {**state, "untold": untold}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        find = self._sampler.find_prompt
        self._untold = [(unpack_group(group, find), fate, version) for group, fate, version in state.get("untold", [])]

    def _call(self, action: Callable[[], Any]) -> Any:
        """Have something done in the producer's thread and wait for it."""
        return self._post(action).result()

    def _post(self, action: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise FleetClosed
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gspo-producer", daemon=True)
            self._thread.start()
        done: Future[Any] = Future()
        self._jobs.put((action, done))
        return done

    def _run(self) -> None:
        """Do what is asked; with nothing asked, work ahead; with nothing to work on, wait."""
        busy = False
        while True:
            try:
                job = self._jobs.get(block=not busy)
            except queue.Empty:
                busy = self._work_ahead()
                continue
            if job is None:
                return
            action, done = job
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)
            busy = True

    def _work_ahead(self) -> bool:
        """One tick; False when there is nothing to do until somebody asks for something."""
        if self._error is not None:
            return False
        try:
            return self._sampler.work_ahead()
        except FleetClosed:
            return False
        except BaseException as error:  # told to the trainer when it asks for the batch
            self._error = error
            return False
