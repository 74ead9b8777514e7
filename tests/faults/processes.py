"""Child processes that train, made by fork from a process that has loaded the libraries and computed nothing."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


class Child:
    """A forked process running `work`; its output goes to a file, and `work` returns its exit code."""

    def __init__(self, work: Callable[[], int], log: Path) -> None:
        self.log = log
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = _run(work, log)
            finally:
                os._exit(code)  # the parent's clean-up must not run here

    def kill_after(self, seconds: float) -> bool:
        """SIGKILL after a while; False when the child had already ended by itself."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return False
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return True

    def wait(self, timeout: float = 600.0) -> int:
        """The exit code, or minus the signal that ended it."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise TimeoutError(f"process {self.pid} did not end in {timeout} s; its output is in {self.log}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _run(work: Callable[[], int], log: Path) -> int:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        return work()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def seconds_of_children() -> float:
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def drop_capabilities() -> None:
    """Give up root's power over file permissions in this process, so that a read-only folder is read-only."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.syscall({"x86_64": 126, "aarch64": 91}[os.uname().machine], header, nothing):
        raise OSError(ctypes.get_errno(), "capset")
