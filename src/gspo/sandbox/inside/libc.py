"""The few C calls the sandbox needs that Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import os
import platform

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
PR_GET_TID_ADDRESS = 40

CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# PyDLL keeps the interpreter lock held: a fork must not happen between releasing and taking it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def machine() -> str:
    """The processor's name as the syscall tables spell it; raises OSError on any other."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if name not in ("x86_64", "aarch64"):
        raise OSError(f"no syscall table for machine {name!r}: the sandbox knows x86_64 and aarch64")
    return name


class Call:
    """A system call prepared beforehand: a fresh child makes it without writing to much memory, which it would copy."""

    def __init__(self, number: int, *args: int | ctypes.Array) -> None:
        self._number = number
        values = [a if isinstance(a, ctypes.Array) else ctypes.c_long(a) for a in args]
        self._values = (ctypes.c_long(number), *values)
        self._syscall = _libc.syscall

    def __call__(self) -> int:
        """Make the call; raises OSError with the kernel's errno."""
        result = self._syscall(*self._values)
        if result < 0:
            raise _last_error(f"system call {self._number}")
        return result


def syscall(number: int, *args: int | ctypes.Array) -> int:
    """A raw system call; raises OSError with the kernel's errno."""
    return Call(number, *args)()


def prctl(option: int, *args: int | ctypes.Array) -> int:
    """prctl(2); raises OSError."""
    padded = [*args, *([0] * (4 - len(args)))]
    values = [a if isinstance(a, ctypes.Array) else ctypes.c_ulong(a) for a in padded]
    result = _libc.prctl(ctypes.c_int(option), *values)
    if result < 0:
        raise _last_error(f"prctl {option}")
    return result


def unshare(flags: int) -> None:
    """unshare(2), which `os` has only from Python 3.12; raises OSError."""
    if _libc.unshare(ctypes.c_int(flags)) < 0:
        raise _last_error(f"unshare {flags:#x}")


def _last_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
