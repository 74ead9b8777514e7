"""What trainer ranks are doing, for the watchdog: they answer through the store at which they joined.

    controller                      store                        rank r
    ask_stacks: counter + 1 ──────► stacks                       main thread: any call, may hang
                                    stacks ◄── every 0.5 s ───── StackAnswers thread
    wait up to 3 s ◄─────────────── stacks/<number>/<r> ◄─────── its stacks

The store belongs to rank 0 or to torchrun and is served without Python, so it answers while every rank hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore

POLL_SECONDS = 0.5  # between a rank's looks at the question counter
ANSWER_SECONDS = 3.0  # for all ranks to answer
CONNECT_SECONDS = 10.0


class StackAnswers:
    """Answers for one rank, in a thread, until `stop` or until the store is gone."""

    def __init__(self, address: str, port: int, rank: int) -> None:
        self._rank = rank
        self._store = connect_store(address, port)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        answered = 0
        while not self._stopped.wait(POLL_SECONDS):
            try:
                asked = self._store.add(store_key("stacks"), 0)
                if asked > answered:
                    self._store.set(store_key("stacks", asked, self._rank), thread_stacks())
                    answered = asked
            except RuntimeError:  # torch's error for a store whose server is gone
                return


def ask_stacks(address: str, port: int, ranks: Sequence[int]) -> str:
    """The stacks of every thread of these ranks, as text. A rank that does not answer is named."""
    try:
        store = connect_store(address, port)
        number = store.add(store_key("stacks"), 1)
        end = time.monotonic() + ANSWER_SECONDS
        keys = {rank: store_key("stacks", number, rank) for rank in ranks}
        while not store.check(list(keys.values())) and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 4)
        stacks = {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}
    except RuntimeError as error:
        stacks = dict.fromkeys(ranks, f"the ranks' store cannot be reached: {error}")
    return "\n".join(f"trainer rank {rank}:\n{text or 'gave no answer'}" for rank, text in stacks.items())


def thread_stacks() -> str:
    """The stacks of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)} of process {os.getpid()}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def connect_store(address: str, port: int, seconds: float = CONNECT_SECONDS) -> TCPStore:
    """A client of the store at which the ranks joined."""
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def store_key(*parts: object) -> str:
    """A key of this launch. torchrun's store outlives the ranks, so ranks that it restarts use new keys."""
    return "/".join(map(str, ("gspo", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), *parts)))
