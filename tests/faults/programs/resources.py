"""Ten programs that want more than their share, or to take the grader down with them. All are bounded."""

from __future__ import annotations

from .attack import Attack, Outcome, World

MEMORY_LIMIT = 256 << 20
OUTPUT_LIMIT = 8 << 20

_DONE = 'DONE = "done" + "-@TOKEN@"\n'

# Turns off a time limit that lives in the program's own process.
_NO_ALARM = "import signal\nsignal.alarm(0)\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"

SOURCES: dict[str, str] = {
    "fork_bomb": """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"@MARK@", 0, 0, 0)
for _ in range(40):
    if os.fork() == 0:
        time.sleep(10)
        os._exit(0)
ctypes.CDLL(None).prctl(15, b"parent", 0, 0, 0)
print(DONE)
""",
    "thread_bomb": """
import threading, time
threading.stack_size(64 << 10)
for _ in range(1000):
    threading.Thread(target=time.sleep, args=(0.5,)).start()
print(DONE)
""",
    "memory": """
blocks = [bytearray(8 << 20) for _ in range(64)]
for block in blocks:
    block[::4096] = b"x" * len(block[::4096])
print(DONE)
""",
    "output_bomb": """
import sys
for _ in range(48):
    sys.stdout.write("x" * (1 << 20))
""",
    "spin": _NO_ALARM
    + """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""",
    "sleep_stop": _NO_ALARM
    + """
import os, time
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
try:
    os.kill(os.getpid(), signal.SIGSTOP)
except OSError:
    pass
time.sleep(3600)
""",
    "recursion": """
import sys
sys.setrecursionlimit(10**9)
class R:
    def __getattr__(self, name):
        return getattr(self, name + "x")
class L(list):
    def __repr__(self):
        return repr([self])
repr(L())
""",
    "segfault": "import ctypes\nctypes.string_at(0)\n",
    "parser_bomb": """
for text in ("(" * 100_000, "-" * 1_000_000 + "1", "[" * 90 + "]" * 90, "a" + ".b" * 200_000, "lambda:" * 50_000 + "0"):
    try:
        compile(text, "bomb", "eval")
    except (SyntaxError, MemoryError, RecursionError, OverflowError):
        pass
""",
    "stdio_fd_unicode": """
import os, sys
os.write(1, b"\\xff\\xfe\\x00\\x80 answer\\n" * 1000)
for fd in range(3, 64):
    try:
        os.dup2(1, fd)
        os.write(fd, b"\\xed\\xa0\\x80")
    except OSError:
        pass
try:
    sys.stdout.write("\\ud800")
    sys.stdout.flush()
except UnicodeError:
    pass
for fd in (0, 1, 2):
    os.close(fd)
""",
}


def _gained(world: World, outcome: Outcome) -> bool:
    return (
        world.done.encode() in outcome.stdout
        or len(outcome.stdout) > OUTPUT_LIMIT
        or outcome.overran
        or outcome.broke_grader
        or bool(world.left_over())
    )


RESOURCES = [Attack(name, "resources", _DONE + source, _gained) for name, source in SOURCES.items()]
