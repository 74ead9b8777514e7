"""Resource limits of a child. They bound what a program can take; the judge's clock bounds how long."""

from __future__ import annotations

import contextlib
import os
import resource

MAX_THREADS = 128
MAX_FILES = 64
MAIN_STACK = 64 << 20


def address_space() -> int:
    """Bytes of address space this process has mapped, 0 where /proc cannot be read."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def apply(memory: int, cpu_seconds: int, count_processes: bool) -> None:
    """Limit this process to `memory` bytes of address space and `cpu_seconds`; no core, no file growth.

    `count_processes`: limit threads by the kernel's count for this user, which is only ours when the user is.
    """
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if count_processes:
        limits[resource.RLIMIT_NPROC] = MAX_THREADS
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def lift() -> None:
    """Lift what this process inherited as far as it may, and allow a larger main stack so that programs can recurse.

    A worker that starts a server may be limited itself; its programs have limits of their own.
    """
    for name in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, (hard, hard))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    wanted = MAIN_STACK if hard == resource.RLIM_INFINITY else min(MAIN_STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
