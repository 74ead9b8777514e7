"""Resource limits of a child: how much a program may use. The judge's clock limits how long it may run."""

from __future__ import annotations

import contextlib
import os
import resource

MAX_THREADS = 128
MAX_FILES = 64
MAIN_STACK = 64 << 20


def address_space() -> int:
    """Bytes of address space that this process has mapped; 0 where /proc cannot be read."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Limits:
    """The limits of this process's children; lower limits of the system stay.

    `count_processes`: limit threads by the kernel's count for this user. Only for a user that nobody else uses.
    """

    def __init__(self, count_processes: bool) -> None:
        self._baseline = address_space()
        fixed = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: MAX_FILES,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if count_processes:
            fixed[resource.RLIMIT_NPROC] = MAX_THREADS
        self._fixed = [(name, min(value, _hard(name))) for name, value in fixed.items()]
        self._most_memory, self._most_cpu = _hard(resource.RLIMIT_AS), _hard(resource.RLIMIT_CPU)

    def apply(self, memory: int, cpu_seconds: int) -> None:
        """Limit this process to `memory` bytes beyond its parent's and `cpu_seconds`; no core, no file growth."""
        memory = min(self._baseline + memory, self._most_memory)
        cpu_seconds = min(cpu_seconds, self._most_cpu)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        for name, value in self._fixed:
            resource.setrlimit(name, (value, value))


def _hard(name: int) -> int:
    """The hard limit of this process; where there is none, a number larger than any limit."""
    hard = resource.getrlimit(name)[1]
    return (1 << 63) - 1 if hard == resource.RLIM_INFINITY else hard


def lift() -> None:
    """Raise the limits that this process inherited as far as possible, and the main stack so that programs can recurse.

    The worker that starts a server may be limited itself; its programs get other limits.
    """
    for name in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, (hard, hard))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    wanted = MAIN_STACK if hard == resource.RLIM_INFINITY else min(MAIN_STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
