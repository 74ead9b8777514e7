"""The system call filter, decided by a small interpreter of its instructions, for both machines."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from gspo.sandbox.inside import seccomp
from gspo.sandbox.inside.syscalls import HIGHEST_KNOWN, NUMBERS, number_of

MACHINES = ("x86_64", "aarch64")
PID = 4242


def decide(program: bytes, arch: int, number: int, args: tuple[int, ...] = ()) -> int:
    """What the kernel would answer: runs the classic BPF program on one call."""
    data = struct.pack(
        "=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *[a & (1 << 64) - 1 for a in (*args, *[0] * (6 - len(args)))]
    )
    code = [struct.unpack_from("=HBBI", program, i) for i in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif op == seccomp.AND:
            accumulator &= k
        elif op == seccomp.JEQ:
            at += yes if accumulator == k else no
        elif op == seccomp.JGE:
            at += yes if accumulator >= k else no
        elif op == seccomp.JUMP:
            at += k
        elif op == seccomp.RETURN:
            return k
        else:
            raise AssertionError(f"unknown instruction {op:#x}")


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


class Filter:
    def __init__(self, machine: str, file_calls: bool) -> None:
        self.machine = machine
        self.program = seccomp.build(machine, PID, file_calls)

    def __call__(self, name: str, *args: int) -> int:
        number = number_of(name, self.machine)
        assert number is not None
        return decide(self.program, seccomp.AUDIT_ARCH[self.machine], number, args)


def test_plain_calls_pass_and_every_unlisted_one_is_refused(machine: str):
    program = seccomp.build(machine, PID, file_calls=True)
    listed = {number_of(name, machine) for name in NUMBERS}
    for number in range(HIGHEST_KNOWN + 1):
        answer = decide(program, seccomp.AUDIT_ARCH[machine], number)
        if number not in listed:
            assert answer == seccomp.EPERM, number
    for name in ("read", "write", "mmap", "futex", "exit_group", "getrandom", "epoll_ctl"):
        assert Filter(machine, True)(name) == seccomp.ALLOW


def test_newer_calls_look_unknown(machine: str):
    program = seccomp.build(machine, PID, file_calls=True)
    for number in (HIGHEST_KNOWN + 1, HIGHEST_KNOWN + 100, 0x3FFFFFFF):
        assert decide(program, seccomp.AUDIT_ARCH[machine], number) == seccomp.ENOSYS


def test_another_architecture_is_killed(machine: str):
    program = seccomp.build(machine, PID, file_calls=True)
    for arch in (0x40000003, 0, seccomp.AUDIT_ARCH["aarch64" if machine == "x86_64" else "x86_64"]):
        assert decide(program, arch, 1) == seccomp.KILL


def test_the_x32_bit_is_refused():
    program = seccomp.build("x86_64", PID, file_calls=True)
    for number in range(600):
        assert decide(program, seccomp.AUDIT_ARCH["x86_64"], number | 0x40000000) == seccomp.ENOSYS


def test_only_threads_may_be_cloned(machine: str):
    check = Filter(machine, True)
    assert check("clone", 0x3D0F00) == seccomp.ALLOW  # what the C library asks for a thread
    for flags in (17, 0, 0x01200011, 0x4111, 0x10000000 | 17, 0x00010000, 0x100):
        assert check("clone", flags) == seccomp.EPERM, hex(flags)
    assert check("clone3", 0, 0) == seccomp.ENOSYS


def test_signals_reach_only_the_process_itself(machine: str):
    check = Filter(machine, True)
    assert check("kill", PID, 9) == seccomp.ALLOW and check("tgkill", PID, 1, 9) == seccomp.ALLOW
    for pid in (0, -1, -PID, 1, PID + 1):
        assert check("kill", pid, 9) == seccomp.EPERM
        assert check("tgkill", pid, pid, 9) == seccomp.EPERM


def test_limits_can_be_read_not_set(machine: str):
    check = Filter(machine, True)
    assert check("prlimit64", 0, 7, 0, 0x1000) == seccomp.ALLOW
    assert check("prlimit64", 0, 7, 0x1000, 0) == seccomp.EPERM
    assert check("prlimit64", 0, 7, 1 << 40, 0) == seccomp.EPERM
    assert check("prlimit64", 1, 7, 0, 0x1000) == seccomp.EPERM


def test_sockets_are_pairs_without_addresses(machine: str):
    check = Filter(machine, True)
    assert check("socketpair", 1, 1, 0) == seccomp.ALLOW
    assert check("socketpair", 2, 1, 0) == seccomp.EPERM
    assert check("sendto", 3, 0x1000, 1, 0, 0, 0) == seccomp.ALLOW
    assert check("sendto", 3, 0x1000, 1, 0, 1 << 40, 16) == seccomp.EPERM


def test_controls_are_listed(machine: str):
    check = Filter(machine, True)
    assert check("ioctl", 1, 0x5401) == seccomp.ALLOW and check("ioctl", 1, 0x5412) == seccomp.EPERM
    assert check("fcntl", 1, 3) == seccomp.ALLOW and check("fcntl", 1, 8, PID) == seccomp.EPERM
    assert check("prctl", 15) == seccomp.ALLOW and check("prctl", 1, 0) == seccomp.EPERM


def test_files_at_each_level(machine: str):
    with_files, without = Filter(machine, True), Filter(machine, False)
    assert with_files("openat", -100, 0x1000, 0) == seccomp.ALLOW
    assert with_files("openat", -100, 0x1000, 0o1000) == seccomp.EPERM, "truncation under a read-only open"
    assert with_files("openat", -100, 0x1000, 0o10000000) == seccomp.EPERM, "O_PATH"
    assert without("openat", -100, 0x1000, 0) == seccomp.EPERM
    assert without("statx", -100, 0x1000) == seccomp.EPERM
    assert without("newfstatat", 0, 0x1000, 0x2000, 0x1000) == seccomp.ALLOW, "fstat of the C library"
    assert without("newfstatat", -100, 0x1000, 0x2000, 0) == seccomp.EPERM


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def test_numbers_are_the_kernels(machine: str):
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]} to compare with")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    for name in NUMBERS:
        number = number_of(name, machine)
        if number is not None:
            assert known[name] == number, name


@pytest.mark.parametrize("file_calls", [True, False])
def test_a_filter_laid_out_beforehand_is_the_one_built_for_the_process(machine: str, file_calls: bool):
    laid_out = seccomp.Filter(machine, file_calls)
    for pid in (1, 2, PID, 4_194_303):
        assert laid_out.program(pid) == seccomp.build(machine, pid, file_calls)
