"""Trainer ranks as Ray actors: a RankGroup whose calls go to a RankWorker in every place of a pool.

controller                                       actor of rank r
call ── put arguments once, run.remote ────────► RankWorker.run ◄── collectives ──► other ranks
ray.wait: first result or error ◄─────────────── returns or raises
after an error: up to CAUSE_SECONDS for the others' errors, then all actors are killed
stacks ── store ───────────────────────────────► StackAnswers thread, also during a call
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorClass
from ray.exceptions import RayError

from gspo.distributed.rank_group import RankFailed, RankPlace
from gspo.distributed.rank_stacks import ask_stacks
from gspo.distributed.rank_worker import RankWorker
from gspo.distributed.ray.actors import THREADS, answer_stacks, free_address, prepare_rank, run
from gspo.distributed.ray.errors import root_cause
from gspo.distributed.ray.resource_pool import ResourcePool
from gspo.rollout.workers.connection import WorkerDied

CAUSE_SECONDS = 5.0  # how long to look for the cause behind a first error


class RayRanks:
    """One actor with a RankWorker in every place of `pool`. All ranks end with `close`, or when one of them fails."""

    def __init__(self, pool: ResourcePool, worker_class: Any = RankWorker) -> None:
        self.world_size = pool.world_size
        actor_class: Any = worker_class if isinstance(worker_class, ActorClass) else ray.remote(worker_class)
        self._actors: list[Any] = []
        try:
            for rank in range(self.world_size):
                self._actors.append(actor_class.options(**pool.options(rank), max_restarts=0).remote())
            self._join(pool)
        except BaseException:
            self._kill()
            raise

    def _join(self, pool: ResourcePool) -> None:
        ((address, port),) = self._gather([self._actors[0].__ray_call__.remote(free_address)])
        device = "cuda:0" if pool.use_gpu else "cpu"  # an actor sees only its own GPUs
        local = [i for num_processes in pool.process_on_nodes for i in range(num_processes)]
        places = [RankPlace(r, self.world_size, local[r], address, port, device) for r in range(self.world_size)]
        num_threads, num_local = os.environ.get(THREADS), max(pool.process_on_nodes)
        prepared = [a.__ray_call__.remote(prepare_rank, os.getcwd(), num_threads, num_local) for a in self._actors]
        self._gather(prepared)
        self._gather([a.join.remote(p) for a, p in zip(self._actors, places, strict=True)])
        self._store = (address, port)
        self._gather([a.__ray_call__.remote(answer_stacks, *self._store, r) for r, a in enumerate(self._actors)])

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._actors:
            raise RankFailed(f"{method.__name__}: the trainer's ranks have ended")
        shared = ray.put(args) if self.world_size > 1 else args  # stored once for all ranks
        return self._gather([actor.__ray_call__.remote(run, method.__name__, shared) for actor in self._actors])

    def _gather(self, refs: Sequence[Any]) -> list[Any]:
        """All results, or the cause of the first failure, without waiting for ranks that wait for a dead one."""
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results, waiting = {}, list(refs)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                results[rank_of[done]] = ray.get(done)
            except RayError as error:
                failures = {rank_of[done]: self._cause(error, rank_of[done])}
                self._add_failures(waiting, rank_of, failures)
                self._kill()
                raise _error_of(failures, self.world_size) from None
        return [results[rank] for rank in range(len(refs))]

    def _add_failures(self, waiting: list[Any], rank_of: dict[Any, int], failures: dict[int, BaseException]) -> None:
        """Collect the errors of other ranks for CAUSE_SECONDS, or until one of them is a death."""
        end = time.monotonic() + CAUSE_SECONDS
        while waiting and not any(isinstance(f, WorkerDied) for f in failures.values()):
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                return
            try:
                ray.get(ready[0])
            except RayError as error:
                failures[rank_of[ready[0]]] = self._cause(error, rank_of[ready[0]])

    def _cause(self, error: RayError, rank: int) -> BaseException:
        return root_cause(error, f"trainer rank {rank} of {self.world_size}")

    def stacks(self) -> str:
        """The stacks of every rank, also during a call."""
        return ask_stacks(*self._store, range(self.world_size)) if self._actors else ""

    def close(self) -> None:
        """Free the models, then end the processes."""
        if not ray.is_initialized():
            self._actors = []
        elif self._actors:
            leaving = [actor.leave.remote() for actor in self._actors]
            ray.wait(leaving, num_returns=len(leaving), timeout=CAUSE_SECONDS)
            self._kill()

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)


def _error_of(failures: dict[int, BaseException], world_size: int) -> BaseException:
    """The error itself if all ranks raised it; RankFailed for a death or an error of some ranks."""
    for _, failure in sorted(failures.items()):
        if isinstance(failure, WorkerDied):
            return RankFailed(str(failure))
    kinds = {type(failure) for failure in failures.values()}
    rank, first = min(failures.items())
    if len(failures) == world_size and len(kinds) == 1:
        return first
    failed = RankFailed(f"trainer rank {rank} of {world_size}: {type(first).__name__}: {first}")
    for note in getattr(first, "__notes__", ()):
        failed.add_note(note)
    return failed
