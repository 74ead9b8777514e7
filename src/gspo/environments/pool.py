"""The pool that plays episodes: a WorkerPool in which an episode stays with its worker while that worker is well.

    Episodes ── play(job) ──▶ queue ──▶ the worker that has the episode, or the idle one with the fewest
              ◀── Future ────────────── answers as JSON

A job whose worker is busy waits for it, unless that worker is stuck: then another worker plays the episode again, and
the stuck one closes its own when it is idle.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gspo.environments import host
from gspo.environments.loading import EnvironmentSpec
from gspo.rewards.pool.frames import pack
from gspo.rewards.pool.worker_pool import WorkerPool
from gspo.rewards.pool.workers import ForkedWorkers, Job, ThreadWorkers, Worker

STUCK_SHARE = 1 / 8  # of the deadline, after which a busy worker's other episodes do not wait for it


@dataclass(slots=True, eq=False)
class EpisodeJob(Job):
    """A job of one episode."""

    key: Hashable = None
    closes: bool = False


class EpisodePool(WorkerPool):
    """Plays episodes on workers. `play` may be called from any thread; `close` leaves nothing running."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._homes: dict[Hashable, Worker] = {}  # the worker of each episode
        self._left: dict[Worker, set[Hashable]] = {}  # episodes that others play now, to be closed
        super().__init__(*args, **options)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the environment's tools."""
        return self.source.info["tools"]

    def play(self, job: host.Job) -> Future[Any]:
        """Queue a job. Its future returns the host's answer or raises JobFailed."""
        return self.enqueue(EpisodeJob(pack(pickle.dumps(job)), Future(), key=job.key, closes=job.prompt is None))

    def end(self, key: Hashable) -> None:
        """Close an episode, if a worker has it."""
        if key in self._homes:
            self.play(host.Job(key))

    def _hand_out(self) -> None:
        idle = {worker for worker in self._workers if worker.ready and worker.job is None}
        self._close_left(idle)
        held = Counter(self._homes.values())
        waiting: deque[Job] = deque()
        while self._queue and idle:
            job = self._queue.popleft()
            assert isinstance(job, EpisodeJob)
            home = self._homes.get(job.key)
            if home is not None and home not in idle and not self._is_stuck(home):
                waiting.append(job)
                continue
            worker = home if home in idle else min(idle, key=lambda worker: held[worker])
            assert worker is not None
            if job.closes:
                if self._homes.pop(job.key, None) is not worker:  # its worker is gone, and the episode with it
                    job.future.cancel()
                    continue
            else:
                self._homes[job.key] = worker
                held[worker] += 1
                if home is not None and home is not worker:
                    self._left.setdefault(home, set()).add(job.key)
            if self._give(worker, job):
                idle.discard(worker)
        self._queue.extendleft(reversed(waiting))

    def _close_left(self, idle: set[Worker]) -> None:
        """Have idle workers close episodes that were taken from them while they were stuck."""
        for worker in [worker for worker in idle if self._left.get(worker)]:
            job = host.Job(self._left[worker].pop())
            self._give(worker, EpisodeJob(pack(pickle.dumps(job)), Future(), num_deaths=self._retries))
            idle.discard(worker)

    def _is_stuck(self, worker: Worker) -> bool:
        return time.monotonic() >= worker.since + STUCK_SHARE * self._timeout

    def _wait_time(self) -> float | None:
        """As of any pool; and until a worker that queued jobs wait for counts as stuck."""
        seconds, now = super()._wait_time(), time.monotonic()
        if seconds is None or not self._queue:
            return seconds
        queued = tuple(self._queue)  # at once: other threads add to it
        homes = {self._homes.get(job.key) for job in queued if isinstance(job, EpisodeJob)}
        due = [
            worker.since + STUCK_SHARE * self._timeout - now for worker in homes if worker is not None and worker.job
        ]
        return max(0.0, min([seconds, *(wait for wait in due if wait > 0)]))

    def _drop(self, worker: Worker) -> str:
        self._forget(worker)
        return super()._drop(worker)

    def _time_out(self, worker: Worker, job: Job, stack: str) -> None:
        self._forget(worker)
        super()._time_out(worker, job, stack)

    def _forget(self, worker: Worker) -> None:
        """The worker ends, and its episodes with it."""
        self._homes = {key: home for key, home in self._homes.items() if home is not worker}
        self._left.pop(worker, None)


def open_pool(
    spec: EnvironmentSpec,
    *,
    num_workers: int,
    timeout: float,
    tool_timeout: float,
    memory: int,
    retries: int,
    max_chars: int,
) -> EpisodePool:
    """The pool of an environment: processes, or threads for an object that exists only in this process."""
    if spec.made is not None:
        source = ThreadWorkers(*host.build_host(spec, tool_timeout, max_chars, seeded=False))
    else:
        source = ForkedWorkers(
            "gspo.environments.host:build_host", (spec, tool_timeout, max_chars), memory=memory, what="environment"
        )
    return EpisodePool(source, num_workers=num_workers, timeout=timeout, retries=retries)
