"""What trainer ranks are doing, for a watchdog: asked over the store at which they met, beside whatever call is under way.

A rank that hangs answers no call, but a thread beside its work does. The store is rank 0's or torchrun's own and
serves without Python, so that it can be asked whatever the ranks do.
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

LOOK_SECONDS = 0.5  # between a rank's looks at whether it was asked
ANSWER_SECONDS = 3.0  # for all ranks to answer
CONNECT = timedelta(seconds=10)


class StackAnswers:
    """Answers for one rank, in a thread, from now until `stop` or the end of the store."""

    def __init__(self, address: str, port: int, rank: int) -> None:
        self._rank = rank
        self._store = _connect(address, port)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        answered = 0
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                asked = self._store.add(_question(), 0)
                if asked > answered:
                    self._store.set(_answer(asked, self._rank), thread_stacks())
                    answered = asked
            except RuntimeError:  # torch's own error for a store whose server is gone
                return


def ask_stacks(address: str, port: int, ranks: Sequence[int]) -> dict[int, str]:
    """What every thread of these ranks does now; "" for one that gives no answer."""
    try:
        store = _connect(address, port)
        number = store.add(_question(), 1)
        end = time.monotonic() + ANSWER_SECONDS
        keys = {rank: _answer(number, rank) for rank in ranks}
        while not store.check(list(keys.values())) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS / 4)
        return {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}
    except RuntimeError as error:
        return dict.fromkeys(ranks, f"the ranks' store cannot be reached: {error}")


def format_stacks(stacks: dict[int, str]) -> str:
    """The answers as a text."""
    return "\n".join(f"trainer rank {rank}:\n{text or 'gave no answer'}" for rank, text in stacks.items())


def thread_stacks() -> str:
    """What every thread of this process does now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)} of process {os.getpid()}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _connect(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT)


def _question() -> str:
    # torchrun's store outlives the ranks: what the last ones were asked is not meant for those it starts again.
    return f"gspo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/stacks"


def _answer(number: int, rank: int) -> str:
    return f"{_question()}/{number}/{rank}"
