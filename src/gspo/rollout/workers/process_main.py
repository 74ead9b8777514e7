"""The program of a rollout worker's process: `python -m gspo.rollout.workers.process_main FD`.

It answers calls on the socket until the trainer closes it. It dies with the trainer (PR_SET_PDEATHSIG), even when it
hangs or is stopped; SIGUSR1 makes it write the stacks of its threads to its log.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from gspo.openmp import choose_spin_count
from gspo.processes import die_with_parent, portable_error


def main(fd: int, parent: int) -> None:
    """Build the engine that the trainer describes and answer its calls."""
    if not die_with_parent(parent):
        return
    choose_spin_count()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    trainer = Connection(fd)
    path, spec = trainer.recv()
    sys.path[:] = path
    serve(trainer, spec)
    sys.stderr.flush()
    os._exit(0)  # the engine is closed: unloading libraries one by one would only take time


def serve(trainer: Connection, spec: Any) -> None:
    """Answer calls one at a time, in order. A worker that could not be built answers every call with the error."""
    worker, failure = None, b""
    try:
        from gspo.rollout.workers.worker import RolloutWorker

        worker = RolloutWorker(spec)
    except Exception as error:
        failure = _error_answer(error)
    while True:
        try:
            method, args = trainer.recv()
        except (EOFError, OSError):
            return
        if worker is None:
            answer = failure
        else:
            try:
                answer = pickle.dumps((True, getattr(worker, method)(*args)))
            except Exception as error:
                answer = _error_answer(error)
        try:
            trainer.send_bytes(answer)
        except OSError:
            return


def _error_answer(error: Exception) -> bytes:
    """An answer that carries an error, as itself where it can be pickled, with this process's traceback as a note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    error.add_note(f"raised in process {os.getpid()}:\n{text}")
    return pickle.dumps((False, portable_error(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
