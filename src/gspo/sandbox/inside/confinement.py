"""What a child gives up before the program runs. The server prepares the system calls; the child only makes them."""

from __future__ import annotations

import os
import signal

from . import libc, limits, seccomp
from .identity import Identity, capset_call
from .syscalls import LANDLOCK_RESTRICT_SELF, number_of


class Confinement:
    """The steps of a level, in order: session, capabilities, death with the server, limits, Landlock, filter."""

    def __init__(self, level: int, identity: Identity, ruleset: int) -> None:
        prctl = number_of("prctl", libc.machine())
        assert prctl is not None
        own_user = level >= 1 and (identity.uid is not None or identity.network_namespace)
        self._limits = limits.Limits(count_processes=own_user)
        self._drop_capabilities = capset_call(identity.capabilities) if level >= 1 else _nothing
        self._die_with_server = libc.Call(prctl, libc.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._enter_landlock = libc.Call(LANDLOCK_RESTRICT_SELF, ruleset, 0) if level >= 2 else _nothing
        self._filter = seccomp.Filter(libc.machine(), file_calls=level >= 2) if level >= 1 else None

    def enter(self, memory: int, cpu_seconds: int) -> None:
        """All steps but the filter, with `memory` bytes beyond the server's and `cpu_seconds`; raises OSError."""
        os.setsid()
        self._drop_capabilities()
        # If the server died before this call, nobody reads the child's report that it is confined.
        self._die_with_server()
        self._limits.apply(memory, cpu_seconds)
        self._enter_landlock()

    def seal(self) -> None:
        """Install the filter, which forbids closing a range of descriptors; raises OSError."""
        if self._filter is not None:
            self._filter.install()


def _nothing() -> None:
    pass
