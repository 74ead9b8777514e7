"""The system call filter: an allow-list in classic BPF, built for one machine and one process."""

from __future__ import annotations

import ctypes
import os
import struct

from . import libc
from .syscalls import FILE_CALLS, HIGHEST_KNOWN, NUMBERS, number_of

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050000 | 1
ENOSYS = 0x00050000 | 38

LOAD, AND, JEQ, JGE, JUMP, RETURN = 0x20, 0x54, 0x15, 0x35, 0x05, 0x06

OFFSET_NR, OFFSET_ARCH, OFFSET_ARGS = 0, 4, 16

THREAD_FLAGS = 0x00010000 | 0x00000100 | 0x00000800  # CLONE_THREAD, CLONE_VM, CLONE_SIGHAND
AT_EMPTY_PATH = 0x1000
AF_UNIX = 1
O_ACCMODE, O_TRUNC, O_PATH = 0o3, 0o1000, 0o10000000

# FIONBIO, FIONCLEX, FIOCLEX, TCGETS (isatty), TIOCGWINSZ, FIONREAD.
IOCTLS = (0x5421, 0x5450, 0x5451, 0x5401, 0x5413, 0x541B)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN: it sends signals.
FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
# PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. Not PR_SET_PDEATHSIG: the child must die with its server.
PRCTLS = (15, 16, 0x53564D41)

Instruction = tuple[int, int, int, int]


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> Instruction:
    return (code, if_true, if_false, k)


def _low(arg: int) -> Instruction:
    return _op(LOAD, OFFSET_ARGS + 8 * arg)


def _high(arg: int) -> Instruction:
    return _op(LOAD, OFFSET_ARGS + 8 * arg + 4)


def _one_of(arg: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow when the argument's low word is one of `values` (the kernel reads these arguments as int)."""
    body = [_low(arg)]
    for value in values:
        body += [_op(JEQ, value, 0, 1), _op(RETURN, ALLOW)]
    return [*body, _op(RETURN, EPERM)]


def _masked(arg: int, mask: int, wanted: int, then: int, otherwise: int) -> list[Instruction]:
    return [_low(arg), _op(AND, mask), _op(JEQ, wanted, 0, 1), _op(RETURN, then), _op(RETURN, otherwise)]


def _null(arg: int) -> list[Instruction]:
    """Continue when the pointer is NULL, refuse otherwise."""
    refuse = _op(RETURN, EPERM)
    return [_low(arg), _op(JEQ, 0, 1, 0), refuse, _high(arg), _op(JEQ, 0, 1, 0), refuse]


def _open_flags(arg: int) -> list[Instruction]:
    """Refuse O_PATH, and O_TRUNC in a read-only open, which old Landlock versions do not check."""
    refuse = _op(RETURN, EPERM)
    return [
        *[_low(arg), _op(AND, O_PATH), _op(JEQ, O_PATH, 0, 1), refuse],
        *_masked(arg, O_TRUNC | O_ACCMODE, O_TRUNC, EPERM, ALLOW),
    ]


def _checked_bodies(pid: int, file_calls: bool) -> dict[str, list[Instruction]]:
    """The calls whose arguments are checked; the table's other calls are allowed with any arguments."""
    bodies = {
        "ioctl": _one_of(1, IOCTLS),
        "fcntl": _one_of(1, FCNTLS),
        "prctl": _one_of(0, PRCTLS),
        "clone": _masked(0, THREAD_FLAGS, THREAD_FLAGS, ALLOW, EPERM),
        "clone3": [_op(RETURN, ENOSYS)],  # its flags are behind a pointer; the C library falls back to clone
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
        "tkill": _one_of(0, (pid,)),
        "prlimit64": [*_null(2), *_one_of(0, (0, pid))],
        "socketpair": _one_of(0, (AF_UNIX,)),
        "sendto": [*_null(4), _op(RETURN, ALLOW)],
    }
    if file_calls:
        bodies |= {"open": _open_flags(1), "openat": _open_flags(2), "newfstatat": [_op(RETURN, ALLOW)]}
    else:
        # The C library asks for the state of an open descriptor through this call.
        bodies["newfstatat"] = _masked(3, 0xFFFFFFFF, AT_EMPTY_PATH, ALLOW, EPERM)
    return bodies


def build(machine: str, pid: int, file_calls: bool) -> bytes:
    """The filter program for process `pid`: allowed calls pass, others fail with EPERM, newer ones with ENOSYS."""
    program = [_op(LOAD, OFFSET_ARCH), _op(JEQ, AUDIT_ARCH[machine], 1, 0), _op(RETURN, KILL), _op(LOAD, OFFSET_NR)]
    if machine == "x86_64":
        program += [_op(JGE, X32_BIT, 0, 1), _op(RETURN, ENOSYS)]
    program += _search(_ranges(machine, pid, file_calls))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _ranges(machine: str, pid: int, file_calls: bool) -> list[tuple[int, list[Instruction]]]:
    """The action from each number on, in order of the numbers; neighbours with the same action are one range."""
    bodies = _checked_bodies(pid, file_calls)
    actions: dict[int, list[Instruction]] = {HIGHEST_KNOWN + 1: [_op(RETURN, ENOSYS)]}
    for name in NUMBERS:
        number = number_of(name, machine)
        if number is None or (name in FILE_CALLS and not file_calls and name not in bodies):
            continue
        actions[number] = bodies.get(name, [_op(RETURN, ALLOW)])
    ranges: list[tuple[int, list[Instruction]]] = []
    for number in range(HIGHEST_KNOWN + 2):
        action = actions.get(number, [_op(RETURN, EPERM)])
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    return ranges


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search over the ranges: the kernel walks the filter for every number when it is installed."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) <= 255:
        return [_op(JGE, ranges[middle][0], len(below), 0), *below, *above]
    return [_op(JGE, ranges[middle][0], 0, 1), _op(JUMP, len(below)), *below, *above]


class Filter:
    """A filter prepared in memory, ready to be installed by the children of this process."""

    def __init__(self, machine: str, file_calls: bool) -> None:
        code = build(machine, 1, file_calls)
        other = build(machine, 2, file_calls)
        self._own_pid = [at for at in range(4, len(code), 8) if code[at : at + 4] != other[at : at + 4]]
        self._code = ctypes.create_string_buffer(code, len(code))
        words = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._code))
        header = ctypes.create_string_buffer(words, len(words))
        number = number_of("prctl", machine)
        assert number is not None
        self._install = libc.Call(number, libc.PR_SET_SECCOMP, 2, header)

    def program(self, pid: int) -> bytes:
        """The filter as process `pid` installs it."""
        self._set_own_pid(pid)
        return self._code.raw

    def install(self) -> None:
        """Install it on this process, irrevocably; needs no_new_privs. Raises OSError where seccomp is missing."""
        self._set_own_pid(os.getpid())
        self._install()

    def _set_own_pid(self, pid: int) -> None:
        if pid != 1:
            for at in self._own_pid:
                struct.pack_into("=I", self._code, at, pid)
