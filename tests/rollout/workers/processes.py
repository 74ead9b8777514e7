"""What processes and shared memory a test leaves behind."""

from __future__ import annotations

import os
import time
from pathlib import Path


def workers() -> set[int]:
    """Rollout worker processes of this test process, dead ones that nobody reaped among them."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            ours = b"gspo.rollout.workers.process_main" in command and str(os.getpid()).encode() in command
            if ours or (int(parent) == os.getpid() and state == "Z"):
                found.add(int(entry.name))
    return found


def exists(pid: int) -> bool:
    """Whether a process is there and not dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 30.0) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def shared_memory() -> set[str]:
    """Names in /dev/shm, and weights that this process still holds."""
    held = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "gspo-weights" in target:
            held.add(target)
    return set(os.listdir("/dev/shm")) | held
