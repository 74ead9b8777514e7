"""What the processes of a run have in common: how they start, die with their parent, end, and report an error.

The reward pool, rollout workers, trainer ranks and Ray actors each keep their own protocol and share this. What runs
inside the sandbox does not: it imports nothing of gspo.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class WorkerError(RuntimeError):
    """Another process raised an error that cannot be raised as itself here; its traceback is in the text."""


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def python_environment(*path: str, **variables: str) -> dict[str, str]:
    """This process's environment plus `variables`; a new Python process finds gspo and what lies in `path`."""
    root = str(Path(__file__).resolve().parents[1])
    folders = filter(None, [root, *path, os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when the *thread* that started it ends. False: `parent` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of processes that this process's descendants leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads, and `pid` itself in case it leads none. Gone already: nothing."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie, which ended and was not yet collected by its parent, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
    except OSError:
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:  # any other than ProcessLookupError: it belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True


def children_of(pid: int) -> list[int]:
    """The direct children of a process, now; none where /proc cannot be read."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def describe_exit(code: int) -> str:
    """How a process with this return code ended, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind((address, 0))
        return s.getsockname()[1]


def portable_error(error: Exception) -> Exception:
    """The error itself where pickling rebuilds it as the same type, else a WorkerError with its text and traceback."""
    with contextlib.suppress(Exception):  # whatever its pickling or its constructor raises
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerError(f"{type(error).__name__}: {error}\n{text}")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
