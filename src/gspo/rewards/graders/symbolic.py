"""math-verify (sympy) in a process that can be killed, with a limit on memory and time.

A reward worker is such a process and calls it directly. Every other process keeps one worker for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from gspo.rewards.pool.worker_pool import JobFailed, WorkerPool
from gspo.rewards.pool.workers import ForkedWorkers
from gspo.rewards.protocol import RewardError

TIME_LIMIT = 3.0
MEMORY = 1024

_lock = threading.Lock()
_pool: WorkerPool | None = None


def symbolic_equal(answer: str, truth: str) -> bool:
    """math-verify's verdict on two LaTeX answers; RewardError when there is none within its limits."""
    if os.environ.get("GSPO_REWARD_WORKER") and threading.current_thread() is threading.main_thread():
        return _limited(answer, truth)
    try:
        return bool(_verifier().submit((answer, truth)).result())
    except JobFailed as error:
        raise RewardError(f"math-verify gave no verdict on {answer!r} against {truth!r}: {error}") from None


def build_verifier() -> tuple[Callable[[tuple[str, str]], bool], None]:
    """The handler of the verifying worker."""
    import math_verify  # noqa: F401  (once, before workers are forked)

    return lambda pair: _limited(*pair), None


def close() -> None:
    """End the verifying worker, if one was started."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def _verifier() -> WorkerPool:
    global _pool
    with _lock:
        if _pool is None:
            workers = ForkedWorkers("gspo.rewards.graders.symbolic:build_verifier", (), memory=MEMORY)
            _pool = WorkerPool(workers, num_workers=1, timeout=TIME_LIMIT + 1.0)
            atexit.register(close)
        return _pool


class _OutOfTime(BaseException):
    """Not an Exception: math-verify and sympy would catch that and return a false verdict."""


def _limited(answer: str, truth: str) -> bool:
    """The comparison under an alarm. Where the alarm cannot interrupt it, the deadline of the worker ends it."""
    late = False

    def stop(*_: Any) -> None:
        nonlocal late
        late = True
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    verdict = False
    try:
        verdict = _compare(answer, truth)
    except _OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    if late:
        raise RewardError(f"math-verify took more than {TIME_LIMIT:g} s on {answer!r} against {truth!r}")
    return verdict


def _compare(answer: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as verify_parsed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about timeouts set to 0, which are ours
    config = [LatexExtractionConfig()]
    parsed = [parse(f"${text}$", extraction_config=config, parsing_timeout=0) for text in (truth, answer)]  # pyright: ignore
    return bool(parsed[0] and parsed[1] and verify_parsed(parsed[0], parsed[1], timeout_seconds=0))  # pyright: ignore
