"""The identity of server and children: their namespaces, their user, the capabilities that they keep."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import libc
from .syscalls import CAPSET, CLONE

FIRST_UID = 1_879_000_000  # far from every range that distributions hand out
CAP_DAC_READ_SEARCH = 2
CAP_SYS_ADMIN = 21
_CAPABILITY_HEADER = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)


@dataclass(frozen=True, slots=True)
class Identity:
    """Namespaces of server and children, the user they become (None: no change), capabilities the children keep."""

    network_namespace: bool
    pid_namespace: bool
    uid: int | None
    capabilities: int

    def assume_as_server(self) -> None:
        """Stop being root; keep the capabilities to make namespaces and to let children read Python. Raises OSError."""
        if self.uid is not None:
            become(self.uid, self.capabilities | (1 << CAP_SYS_ADMIN if self.pid_namespace else 0))


def enter_namespaces() -> bool:
    """Move this process into new network, IPC and host-name namespaces; False where that is not allowed.

    An ordinary user needs a user namespace for it, which some systems block; the sandbox works without.
    """
    inner = libc.CLONE_NEWNET | libc.CLONE_NEWIPC | libc.CLONE_NEWUTS
    with contextlib.suppress(OSError):
        libc.unshare(inner)
        return True
    uid, gid = os.getuid(), os.getgid()
    try:
        libc.unshare(libc.CLONE_NEWUSER | inner)
    except OSError:
        return False
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{uid} {uid} 1"),
        ("/proc/self/gid_map", f"{gid} {gid} 1"),
    ):
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(text)
    return True


class Cloner:
    """fork(2) as a raw system call, so that each child can get its own PID namespace.

    `unshare` would do that for one child only. CPython's fork hooks run as in `os.fork`; the kernel writes the new
    thread id where the C library keeps it.
    """

    def __init__(self, pid_namespace: bool) -> None:
        flags = int(signal.SIGCHLD) | (libc.CLONE_NEWPID if pid_namespace else 0)
        tid_address = _tid_address()
        if tid_address:
            flags |= libc.CLONE_CHILD_SETTID | libc.CLONE_CHILD_CLEARTID
        self._clone = libc.Call(CLONE[libc.machine()], flags, 0, 0, tid_address, tid_address)
        api = ctypes.pythonapi
        self._before, self._in_parent = api.PyOS_BeforeFork, api.PyOS_AfterFork_Parent
        self._in_child = api.PyOS_AfterFork_Child
        for hook in (self._before, self._in_parent, self._in_child):
            hook.restype = None

    def fork(self) -> int:
        """Returns as os.fork does; raises OSError."""
        self._before()
        try:
            pid = self._clone()
        except OSError:
            self._in_parent()
            raise
        if pid:
            self._in_parent()
        else:
            self._in_child()
        return pid


def _tid_address() -> int:
    address = ctypes.create_string_buffer(8)
    try:
        libc.prctl(libc.PR_GET_TID_ADDRESS, address)
    except OSError:
        return 0
    return struct.unpack("Q", address.raw)[0]


def probe(network_namespace: bool, must_read: str) -> Identity:
    """Find by trying which namespaces and which user are available. The file `must_read` must stay readable."""
    pid_namespace = _succeeds_in_child(lambda: None, pid_namespace=True)
    uid = FIRST_UID + os.getpid() % 100_000  # nobody else's user, so that the kernel counts only its threads
    # Python may be in a private home folder: without the right to read it, imports after the change of user would fail.
    for capabilities in (0, 1 << CAP_DAC_READ_SEARCH):
        if _succeeds_in_child(partial(become, uid, capabilities, must_read)):
            return Identity(network_namespace, pid_namespace, uid, capabilities)
    return Identity(network_namespace, pid_namespace, None, 0)


def capset_call(capabilities: int) -> libc.Call:
    """The call that keeps only `capabilities`."""
    words = struct.pack("=6I", capabilities, capabilities, 0, 0, 0, 0)
    words = ctypes.create_string_buffer(words, len(words))
    return libc.Call(CAPSET[libc.machine()], _CAPABILITY_HEADER, words)


def become(uid: int | None, capabilities: int, must_read: str | None = None) -> None:
    """Become user and group `uid` (None: no change), keep only `capabilities`; raises OSError."""
    if uid is not None:
        libc.prctl(libc.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    capset_call(capabilities)()
    if must_read is not None:
        os.close(os.open(must_read, os.O_RDONLY))


def _succeeds_in_child(action: Callable[[], None], pid_namespace: bool = False) -> bool:
    """Whether `action` succeeds in a child."""
    try:
        pid = Cloner(pid_namespace).fork()
    except OSError:
        return False
    if pid == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
