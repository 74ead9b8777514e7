"""Trainer ranks that torchrun started: rank 0 is the controller and a rank, the others follow its calls.

    torchrun --nproc-per-node 2 -m gspo train … actor_rollout_ref.actor.strategy=fsdp2

    rank 0 (loop)                                   rank 1 … (follow)
    call ── broadcast (method, arguments) ────────► waits for the next call
    own RankWorker.run  ◄──── collectives ────────► RankWorker.run
    waits for all ◄──────── gather results ──────── sends its result, waits for the next call
    dismiss ── broadcast END ─────────────────────► leaves

Calls travel over gloo. `RankWatch` notices a rank that failed or disappeared while another waits for it. Without
torchrun the group is this one process.
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
from gspo.distributed.rank_stacks import StackAnswers, ask_stacks
from gspo.distributed.rank_watch import RankWatch, describe, is_network_error
from gspo.distributed.rank_worker import RankWorker
from gspo.exit_codes import EXIT_WORKERS_LOST

CAUSE_SECONDS = 10.0  # how long to look for the cause behind an error that only says that a rank is gone
# Followers wait for the next call without a limit; the watch notices a dead rank.
FOREVER = timedelta(days=365)
REMEDY = "go on from the last checkpoint with the same command"
END = "end"  # the call that ends the followers


class TorchrunRanks:
    """The RankGroup of one launch. A process belongs to one launch, so it has one group: `TorchrunRanks.join`."""

    _joined: TorchrunRanks | None = None

    def __init__(self, place: RankPlace) -> None:
        self.world_size, self.rank = place.world_size, place.rank
        self.failed = False
        self._worker = RankWorker()
        self._worker.join(place)
        # A separate process group for calls, which may come hours apart.
        self._control: Any = dist.new_group(backend="gloo", timeout=FOREVER)
        self._watch = RankWatch(place) if place.world_size > 1 else None
        self._store = (place.address, place.port)
        self._answers = StackAnswers(*self._store, place.rank) if place.rank > 0 else None

    @classmethod
    def join(cls, device: str) -> TorchrunRanks:
        """The group of this launch. The first call joins the other ranks; later calls return the same group."""
        if cls._joined is None:
            cls._joined = cls(launched_place(device))
        return cls._joined

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if self.failed:
            raise RankFailed(f"{method.__name__}: the trainer's ranks have ended")
        if self.world_size == 1:  # no other rank can be out of step: the group is usable after an error
            return [self._worker.run(method.__name__, args)]
        try:
            if self._watch is not None and self._watch.cause is not None:
                raise RankFailed(f"{self._watch.cause}; {REMEDY}")
            dist.broadcast_object_list([(method.__name__, args)], src=0, group=self._control)
            own = self._worker.run(method.__name__, args)
            results: list[Any] = [None] * self.world_size
            dist.gather_object(own, results, dst=0, group=self._control)
            return results
        except BaseException as error:
            self.failed = True
            raise self._explain(error) from error

    def _explain(self, error: BaseException) -> BaseException:
        """The error itself if it began here; another rank's cause if the error only followed from that."""
        if self._watch is None or isinstance(error, RankFailed):
            return error
        if is_network_error(error):
            cause = self._watch.find_cause(CAUSE_SECONDS)
            cause = cause or f"a trainer rank cannot be reached: {describe(error)}"
            return RankFailed(f"{cause}; {REMEDY}")
        self._watch.fail(describe(error))
        return error

    def stacks(self) -> str:
        """The stacks of the followers. This process is rank 0."""
        others = range(1, self.world_size)
        return ask_stacks(*self._store, others) if others else ""

    def follow(self) -> int:
        """Run rank 0's calls until END. Returns the exit code of this process."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 decides when all ranks stop
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
            return self._report_failure(error)

    def _report_failure(self, error: BaseException) -> int:
        """Print another rank's cause, or report this rank's own to the others with its traceback here."""
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
        """Free the models on all ranks. The processes stay for another run of this launch until `dismiss`."""
        if not self.failed and dist.is_initialized():
            self.call(RankWorker.unload)

    def dismiss(self, error: BaseException | None = None) -> None:
        """End the followers. After an error of rank 0 or a failed call they read the cause and end by themselves."""
        if not self.failed and self.world_size > 1:
            with suppress(RuntimeError):  # a follower has ended already
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
    """A context around rank 0's work. The followers end with it, also after an error."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        if (ranks := TorchrunRanks._joined) is not None:
            ranks.dismiss(failure)
