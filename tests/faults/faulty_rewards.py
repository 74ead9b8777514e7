"""Reward functions that fail in every way; the response that they grade says how."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

NONSENSE: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "minus_inf": float("-inf"),
    "none": None,
    "text": "very good",
    "list": [1.0],
    "complex": 1j,
    "no_score": {"acc": 1.0},
    "nan_acc": {"score": 1.0, "acc": float("nan")},
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Any:
    """The number in the response, unless it says how to fail."""
    word, _, argument = solution_str.partition(" ")
    if word == "raise":
        raise KeyError(f"cannot grade {argument}")
    if word == "spin":
        while True:
            pass
    if word == "sleep":
        time.sleep(3600)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die_once" and not Path(argument).exists():
        Path(argument).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "allocate":
        return float(len(bytearray(int(argument) << 20)))
    if word == "daemon":
        _leave_daemon(argument)
    if word == "pause":
        time.sleep(float(argument))
    return NONSENSE[word] if word in NONSENSE else float(len(solution_str))


def too_many(completions: list[str], **columns: Any) -> list[float]:
    """One value more than there are completions."""
    return [1.0] * (len(completions) + 1)


def sometimes_raising(prompt: Any, response: str, share: float = 0.0) -> float:
    """The first character's code is even: 1 or 0; raises on a share of the responses, always the same ones.

    Not on the row's own answer, with which it is tried before the run starts.
    """
    digest = hashlib.blake2b(f"{prompt.uid}/{response}".encode(errors="replace"), digest_size=4).digest()
    if int.from_bytes(digest, "big") < share * 2**32 and response != str(prompt.ground_truth):
        raise KeyError(f"cannot grade {response!r}")
    return float(bool(response) and ord(response[0]) % 2 == 0)


def _leave_daemon(pid_file: str) -> None:
    """Start a process that outlives its parent, in a session of its own."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(3600)
    os._exit(0)
