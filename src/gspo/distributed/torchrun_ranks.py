"""Trainer ranks that torchrun started: rank 0 is the controller and a rank, the others follow its calls.

    torchrun --nproc-per-node 2 -m gspo train … actor_rollout_ref.actor.strategy=fsdp2

A call is broadcast over gloo with its arguments; every rank runs it, and rank 0 gathers the results. Without torchrun
the group is this one process.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gspo.distributed.launch import launched_place
from gspo.distributed.rank_group import RankFailed, RankPlace
from gspo.distributed.rank_stacks import StackAnswers, ask_stacks, format_stacks
from gspo.distributed.rank_watch import RankWatch, describe, is_network_error
from gspo.distributed.rank_worker import RankWorker
from gspo.exit_codes import EXIT_WORKERS_LOST

CAUSE_SECONDS = 10.0  # how long to look for the error behind one that only says that a rank is gone
# Followers wait for the next call however long it takes; the watch notices a dead rank.
FOREVER = timedelta(days=365)
REMEDY = "go on from the last checkpoint with the same command"
END = "end"  # the call with which followers end


class TorchrunRanks:
    """The RankGroup of one launch. A process belongs to one launch, so there is one of it: `TorchrunRanks.join`."""

    _joined: TorchrunRanks | None = None

    def __init__(self, place: RankPlace) -> None:
        self.world_size, self.rank = place.world_size, place.rank
        self.failed = False
        self._worker = RankWorker()
        self._worker.join(place)
        # Objects travel in a group of their own, whose calls may come hours apart.
        self._control: Any = dist.new_group(backend="gloo", timeout=FOREVER)
        self._watch = RankWatch(place) if place.world_size > 1 else None
        self._store = (place.address, place.port)
        self._answers = StackAnswers(*self._store, place.rank) if place.rank > 0 else None

    @classmethod
    def join(cls, device: str) -> TorchrunRanks:
        """The group of this launch: it meets at the first call; later calls return the same one."""
        if cls._joined is None:
            cls._joined = cls(launched_place(device))
        return cls._joined

    @classmethod
    def joined(cls) -> TorchrunRanks | None:
        """The group of this launch, if this process has joined it."""
        return cls._joined

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if self.failed:
            raise RankFailed(f"{method.__name__}: the trainer's ranks have ended")
        if self.world_size == 1:  # no other rank can be out of step: an error leaves the group as it was
            return [self._worker.run(method.__name__, args)]
        try:
            self._check()
            dist.broadcast_object_list([(method.__name__, args)], src=0, group=self._control)
            own = self._worker.run(method.__name__, args)
            results: list[Any] = [None] * self.world_size
            dist.gather_object(own, results, dst=0, group=self._control)
            return results
        except BaseException as error:
            self.failed = True
            raise self._explain(error) from error

    def _check(self) -> None:
        if self._watch is not None and self._watch.cause is not None:
            raise RankFailed(f"{self._watch.cause}; {REMEDY}")

    def _explain(self, error: BaseException) -> BaseException:
        """The error itself when it began here; the other rank's cause when it is only what followed from it."""
        if self._watch is None or isinstance(error, RankFailed):
            return error
        if is_network_error(error):
            cause = self._watch.find_cause(CAUSE_SECONDS)
            cause = cause or f"a trainer rank cannot be reached: {describe(error)}"
            return RankFailed(f"{cause}; {REMEDY}")
        self._watch.fail(describe(error))
        return error

    def stacks(self) -> str:
        """What the followers are doing. This process is rank 0."""
        others = range(1, self.world_size)
        return format_stacks(ask_stacks(*self._store, others)) if others else ""

    def follow(self) -> int:
        """Run rank 0's calls until it ends them; the exit code of this process."""
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when all stop
            signal.signal(number, signal.SIG_IGN)
        assert self._watch is not None
        try:
            while True:
                received: list[Any] = [None]
                dist.broadcast_object_list(received, src=0, group=self._control)
                method, args = received[0]
                if method == END:
                    self._leave()
                    return 0
                result = self._worker.run(method, args)
                dist.gather_object(result, None, dst=0, group=self._control)
        except BaseException as error:
            return self._follower_ends(error)

    def _follower_ends(self, error: BaseException) -> int:
        """Leave the cause for the others, or name theirs; the traceback of a cause is shown where it happened."""
        assert self._watch is not None
        if is_network_error(error) and (cause := self._watch.find_cause(CAUSE_SECONDS)):
            print(f"trainer rank {self.rank} stops: {cause}", file=sys.stderr)
        else:
            self._watch.fail(describe(error))
            print(f"trainer rank {self.rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
        sys.stderr.flush()
        self._watch.stop()
        return EXIT_WORKERS_LOST

    def close(self) -> None:
        """Free the models everywhere; the processes stay for another run of this launch until `dismiss`."""
        if not self.failed and dist.is_initialized():
            self.call(RankWorker.unload)

    def dismiss(self, error: BaseException | None = None) -> None:
        """End the followers. After an error of rank 0 or a failed call they see the cause and end by themselves."""
        if not self.failed and self.world_size > 1:
            with suppress(RuntimeError):  # a follower that is gone has ended already
                dist.broadcast_object_list([(END, ())], src=0, group=self._control)
        elif self._watch is not None and error is not None and not isinstance(error, RankFailed):
            self._watch.fail(describe(error))
        self._leave()

    def _leave(self) -> None:
        if self._answers is not None:
            self._answers.stop()
        if self._watch is not None:
            self._watch.stop()
        if not self.failed:
            self._worker.leave()
        TorchrunRanks._joined = None


@contextmanager
def launched_rank_group() -> Iterator[None]:
    """Around what rank 0 does: afterwards the followers end, whatever happened."""
    try:
        yield
    except BaseException as error:
        if (ranks := TorchrunRanks.joined()) is not None:
            ranks.dismiss(error)
        raise
    if (ranks := TorchrunRanks.joined()) is not None:
        ranks.dismiss()
