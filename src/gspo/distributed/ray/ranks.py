"""The trainer's ranks as Ray actors: a RankGroup whose calls travel to a RankWorker in every place of a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from gspo.distributed.rank_group import RankFailed, RankPlace
from gspo.distributed.rank_stacks import ask_stacks, format_stacks
from gspo.distributed.rank_worker import RankWorker
from gspo.distributed.ray.actors import THREADS, answer_stacks, as_actor_class, free_port, local_numbers, run, settle
from gspo.distributed.ray.errors import WorkerDied, root_cause
from gspo.distributed.ray.resource_pool import ResourcePool

CAUSE_SECONDS = 5.0  # after a first error: how long to look for the one behind it


class RayRanks:
    """One actor with a RankWorker in every place of `pool`. The ranks end with `close`, or when one of them fails."""

    def __init__(self, pool: ResourcePool, worker_class: Any = RankWorker) -> None:
        self.world_size = pool.world_size
        actor_class = as_actor_class(worker_class)
        self._actors: list[Any] = []
        try:
            for rank in range(self.world_size):
                self._actors.append(actor_class.options(**pool.options(rank), max_restarts=0).remote())
            self._join(pool)
        except BaseException:
            self._kill()
            raise

    def _join(self, pool: ResourcePool) -> None:
        ((address, port),) = self._gather([self._actors[0].__ray_call__.remote(free_port)])
        device = "cuda:0" if pool.use_gpu else "cpu"  # an actor sees only its own GPUs
        local = local_numbers(pool.process_on_nodes)
        places = [RankPlace(r, self.world_size, local[r], address, port, device) for r in range(self.world_size)]
        named, most = os.environ.get(THREADS), max(pool.process_on_nodes)
        self._gather([a.__ray_call__.remote(settle, os.getcwd(), named, most) for a in self._actors])
        self._gather([a.join.remote(p) for a, p in zip(self._actors, places, strict=True)])
        self._store = (address, port)
        self._gather([a.__ray_call__.remote(answer_stacks, *self._store, r) for r, a in enumerate(self._actors)])

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._actors:
            raise RankFailed(f"{method.__name__}: the trainer's ranks have ended")
        shared = ray.put(args) if self.world_size > 1 else args  # once, however many ranks read it
        return self._gather([actor.__ray_call__.remote(run, method.__name__, shared) for actor in self._actors])

    def _gather(self, refs: Sequence[Any]) -> list[Any]:
        """All results, or the error behind the first failure: ranks that wait for a dead one are not waited for."""
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results, waiting = {}, list(refs)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                results[rank_of[done]] = ray.get(done)
            except RayError as error:
                failures = {rank_of[done]: self._cause(error, rank_of[done])}
                self._look_further(waiting, rank_of, failures)
                self._kill()
                raise _verdict(failures, self.world_size) from None
        return [results[rank] for rank in range(len(refs))]

    def _look_further(self, waiting: list[Any], rank_of: dict[Any, int], failures: dict[int, BaseException]) -> None:
        """Collect the errors of other ranks for a moment, unless a death explains them already."""
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
        """What every rank is doing, also while a call is under way."""
        return format_stacks(ask_stacks(*self._store, range(self.world_size))) if self._actors else ""

    def close(self) -> None:
        """Let the ranks free what they hold, then end their processes."""
        actors, self._actors = self._actors, []
        if not actors or not ray.is_initialized():
            return
        leaving = [actor.leave.remote() for actor in actors]
        ray.wait(leaving, num_returns=len(leaving), timeout=CAUSE_SECONDS)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)


def _verdict(failures: dict[int, BaseException], world_size: int) -> BaseException:
    """An error that all ranks met is raised as itself; a death, or one rank's own error, as RankFailed."""
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
