"""System call numbers of x86_64 and aarch64, and the sets of them that each level allows."""

from __future__ import annotations

# Each call's name and its numbers on x86_64 and aarch64; "-" where the machine has no such call.
_TABLE = """
    read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    ioctl 16 29, pread64 17 67, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124,
    mremap 25 216, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -,
    setitimer 38 103, getpid 39 172, sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockname 51 204,
    getpeername 52 205, socketpair 53 199, getsockopt 55 209, clone 56 220, exit 60 93, wait4 61 260, kill 62 129,
    uname 63 160, fcntl 72 25, fsync 74 82, fdatasync 75 83, getcwd 79 17, readlink 89 -, umask 95 166,
    gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
    getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
    getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156, rt_sigpending 127 136,
    rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, getpriority 140 141, sched_getparam 143 121,
    sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    sched_rr_get_interval 148 127, prctl 157 167, gettid 186 178, tkill 200 130, time 201 -, futex 202 98,
    sched_getaffinity 204 123, epoll_create 213 -, getdents64 217 61, set_tid_address 218 96, restart_syscall 219 128,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -,
    epoll_ctl 233 21, tgkill 234 131, waitid 247 95, openat 257 56, newfstatat 262 79, readlinkat 267 78,
    faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, epoll_pwait 281 22, eventfd2 290 19,
    epoll_create1 291 20, dup3 292 24, pipe2 293 59, preadv 295 69, prlimit64 302 261, getcpu 309 168,
    getrandom 318 278, statx 332 291, rseq 334 293, clone3 435 435, faccessat2 439 439, epoll_pwait2 441 441,
    futex_waitv 449 449
"""


def _read_table() -> dict[str, tuple[int | None, int | None]]:
    entries = (entry.split() for entry in _TABLE.split(","))
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in entries}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


# The calls that a program may make, by name: (x86_64, aarch64).
NUMBERS = _read_table()

# Numbers above this are newer than this table: "not implemented" makes the C library fall back.
HIGHEST_KNOWN = 449

# Calls that name a file. The flags of `open` and `openat` are checked as well.
_FILE_CALLS = """
    open openat stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd getdents64
"""
FILE_CALLS = frozenset(_FILE_CALLS.split())

# Calls that the sandbox itself makes and a program may not.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
CLONE = {"x86_64": 56, "aarch64": 220}
CAPSET = {"x86_64": 126, "aarch64": 91}


def number_of(name: str, machine: str) -> int | None:
    """The call's number on `machine`; None where it does not exist."""
    return NUMBERS[name][0 if machine == "x86_64" else 1]
