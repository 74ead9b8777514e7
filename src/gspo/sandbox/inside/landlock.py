"""Landlock: restricts the files that this process and its children may open, irrevocably."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from . import libc
from .syscalls import LANDLOCK_ADD_RULE, LANDLOCK_CREATE_RULESET

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
RULE_PATH_BENEATH = 1
O_PATH = 0o10000000

# File rights known to each version; a right is handled (refused unless granted) once the kernel knows it.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_RIGHTS = 0b11  # bind and connect of TCP, from version 4
_SCOPES = 0b11  # abstract sockets and signals, from version 6


def version() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    try:
        return libc.syscall(LANDLOCK_CREATE_RULESET, 0, 0, 1)
    except OSError:
        return 0


def make_ruleset(readable: Iterable[str], listable: Iterable[str], devices: Iterable[str]) -> int:
    """A descriptor of the rules: read beneath `readable`, list names beneath `listable`, read and write `devices`.

    Missing paths are skipped. The server makes it once; each child applies it with one call. Raises OSError where
    Landlock is missing.
    """
    known = version()
    if known < 1:
        raise OSError("the kernel has no Landlock (Linux 5.13 or newer, with landlock in its list of LSMs)")
    handled = _FS_RIGHTS[min(known, 5)]
    words = struct.pack("=QQQ", handled, _NET_RIGHTS, _SCOPES)[: 8 if known < 4 else 16 if known < 6 else 24]
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.create_string_buffer(words, len(words)), len(words), 0)
    for path in readable:
        _grant(ruleset, path, READ_FILE | READ_DIR, handled)
    for path in listable:
        _grant(ruleset, path, READ_DIR, handled)
    for path in devices:
        _grant(ruleset, path, READ_FILE | WRITE_FILE | TRUNCATE, handled)
    return ruleset


def _grant(ruleset: int, path: str, rights: int, handled: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        folder = os.open(path, O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(folder).st_mode):
                rights &= ~READ_DIR
            rule = struct.pack("=Qi", rights & handled, folder)
            libc.syscall(LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
        finally:
            os.close(folder)
