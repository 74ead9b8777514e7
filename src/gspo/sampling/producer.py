"""The producer: a dynamic sampler in its own thread, which prepares the next batches while the trainer trains.

    trainer's thread                         producer's thread
    next_batch() ──── job, waits ──────────► sampler.next_batch()     steps the engine until a batch is ready
                 ◄─── batch ────────────────
    train on it                              sampler.work_ahead()     within the staleness budget, while no job waits
    release()    ──── job, does not wait ──► sampler.release()
    state_dict() ──── job, waits ──────────► sampler.state_dict()

Only the producer's thread calls the sampler, and jobs run in the order of the calls: to the loop it is the sampler.
With a staleness budget of 0 there is no work ahead, and the batches are those of the plain sampler. An error in work
ahead is kept and raised by the next `next_batch`.
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

UNRECORDED = "untold"  # the name in checkpoints
Job = tuple[Callable[[], Any], Future[Any]]


class Producer:
    """A Sampler that runs the sampler which `make(record)` builds.

    Fates are passed to `record` when the batch during which they were decided is handed out. The records of a step are
    then complete when the step is, and a checkpoint contains the fates that are not recorded yet.
    """

    def __init__(self, make: Callable[[Record], DynamicSampler], record: Record | None = None) -> None:
        self._record = record or (lambda group, fate, version: None)
        self._unrecorded: list[tuple[Group, str, int]] = []
        self._sampler = make(lambda group, fate, version: self._unrecorded.append((group, fate, version)))
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # of work ahead
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def version(self) -> int:
        return self._sampler.version

    def next_batch(self) -> tuple[list[Group], SamplingCounts]:
        """Wait for the next batch; raises what `DynamicSampler.next_batch` raises."""
        batch, unrecorded = self._call(self._produce)
        for group, fate, version in unrecorded:
            self._record(group, fate, version)
        return batch

    def release(self, groups: list[Group]) -> None:
        """State that the last batch has been trained on and that the new weights are live. Returns at once."""
        self._post(lambda: self._sampler.release(groups))

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state and the fates that are not recorded yet."""
        return self._call(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call(lambda: self._load(state))

    def close(self) -> None:
        """End the thread. The engine must be closed before, so that the thread does not wait for a step of it."""
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
        unrecorded, self._unrecorded = self._unrecorded, []
        return batch, unrecorded

    def _state(self) -> dict[str, Any]:
        state = self._sampler.state_dict()
        unrecorded = [[pack_group(group), fate, version] for group, fate, version in self._unrecorded]
        return {**state, UNRECORDED: unrecorded}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        find = self._sampler.find_prompt
        self._unrecorded = [
            (unpack_group(group, find), fate, version) for group, fate, version in state.get(UNRECORDED, [])
        ]

    def _call(self, action: Callable[[], Any]) -> Any:
        """Run something in the producer's thread and wait for its result."""
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
        """Run the jobs. Without one, work ahead; with nothing to work on, wait for a job."""
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
        """One tick; False when there is nothing to do until the next job."""
        if self._error is not None:
            return False
        try:
            return self._sampler.work_ahead()
        except FleetClosed:
            return False
        except BaseException as error:  # raised by the next `next_batch`
            self._error = error
            return False
