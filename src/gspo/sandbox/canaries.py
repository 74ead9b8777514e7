"""The self-test of a level: small programs that try what must be refused, judged by their effect."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import tempfile
from pathlib import Path

from .fork_server import ServerHandle
from .judge import DEFAULT_MEMORY, run_script
from .levels import CanaryReport, LevelReport
from .result import SandboxError

WALL = 20.0

# A canary prints this when it succeeded; the judge also looks for the effect itself.
DONE = "canary-done"

_RAW = """
import ctypes, os, platform
_libc = ctypes.CDLL(None, use_errno=True)
def raw(x86, arm, *args):
    number = x86 if platform.machine() in ("x86_64", "AMD64") else arm
    return _libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
def done_if(good):
    if good:
        print("canary-done", flush=True)
"""


# @FOLDER@ holds a secret file, somebody listens on @PORT@, @PID@ is the judge.
CANARIES: dict[str, str] = {
    "read a file": 'print(open("@FOLDER@/secret").read())',
    "write a file": 'open("@FOLDER@/written", "w").write("x")',
    "append to a file": 'f = open("@FOLDER@/secret", "a"); f.write("x"); f.close()',
    "remove a file": 'import os; os.remove("@FOLDER@/victim")',
    "list a folder": 'import os; done_if("secret" in os.listdir("@FOLDER@"))',
    "read memory of the judge": 'done_if(len(open("/proc/@PID@/environ", "rb").read()) >= 0)',
    "connect": 'import socket; done_if(socket.create_connection(("127.0.0.1", @PORT@), 2) is not None)',
    "listen": 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(); done_if(True)',
    "fork": "import os\npid = os.fork()\nif pid:\n    done_if(True)\nelse:\n    os._exit(0)",
    "exec": 'import os; os.execv("/bin/echo", ["echo", "canary-done"])',
    "signal another process": "import os; os.kill(os.getppid() or -1, 0); done_if(True)",
    "trace": "done_if(raw(101, 117, 16, @PID@, 0, 0) == 0 or raw(101, 117, 0, 0, 0, 0) == 0)",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)); done_if(True)",
    "new namespace": "done_if(raw(272, 97, 0x10000000) == 0)",
    "anonymous file": 'import os; done_if(os.memfd_create("x") >= 0)',
    "io_uring": "done_if(raw(425, 425, 1, ctypes.addressof(ctypes.create_string_buffer(256))) >= 0)",
    "clone3": "ctypes.set_errno(0); raw(435, 435, 0, 0); done_if(ctypes.get_errno() != 38)",
}


def run_canaries(level: int) -> LevelReport:
    """Try every canary on a server of the level. It is granted only if all are refused and an honest program runs."""
    try:
        server = ServerHandle(level)
    except (SandboxError, OSError) as error:
        return LevelReport(level, False, str(error))
    try:
        honest = _honest_problem(server, level)
        reports = tuple(_try_canary(server, name) for name in CANARIES)
    except SandboxError as error:
        return LevelReport(level, False, str(error))
    finally:
        server.close()
    broken = [report.name for report in reports if not report.refused]
    reason = f"a program could {', '.join(broken)}" if broken else honest
    return LevelReport(level, not reason, reason, reports)


def _honest_problem(server: ServerHandle, level: int) -> str:
    """Why an honest program failed; "" when it did not."""
    late = "import wave, fractions\n" if level >= 2 else ""
    source = "import threading\nt = threading.Thread(target=lambda: print(int(input()) * 7))\nt.start()\nt.join()"
    result = run_script(server, late + source, b"6\n", WALL, DEFAULT_MEMORY)
    if result.stdout == b"42\n" and result.exit_code == 0:
        return ""
    return f"an honest program failed: {result.stderr.decode(errors='replace').strip()[-300:]}"


def _try_canary(server: ServerHandle, name: str) -> CanaryReport:
    """Run a canary and look for its effects: printed text, changed files, a connection, a stopped judge."""
    with tempfile.TemporaryDirectory(prefix="gspo-canary-") as path, _listener() as (port, contacted):
        folder, secret = Path(path), secrets.token_hex(16)
        folder.chmod(0o777)
        for file in ("secret", "victim"):
            (folder / file).write_text(secret)
            (folder / file).chmod(0o666)
        source = _RAW + CANARIES[name]
        for mark, value in {"@FOLDER@": folder, "@PORT@": port, "@PID@": os.getpid()}.items():
            source = source.replace(mark, str(value))
        result = run_script(server, source, b"", WALL, DEFAULT_MEMORY)
        harmed = {file.name: file.read_text() for file in folder.iterdir()} != {"secret": secret, "victim": secret}
        printed = result.stdout.decode(errors="replace")
        stopped_judge = result.timed_out or result.signal == signal.SIGSTOP
        succeeded = secret in printed or DONE in printed or stopped_judge or harmed or contacted()
    errors = result.stderr.decode(errors="replace").strip().splitlines()
    return CanaryReport(name, not succeeded, errors[-1] if errors else "done" if succeeded else "refused")


@contextlib.contextmanager
def _listener():
    """A local port, and a function that tells whether anything connected to it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setblocking(False)

        def contacted() -> bool:
            with contextlib.suppress(BlockingIOError):
                sock.accept()[0].close()
                return True
            return False

        yield sock.getsockname()[1], contacted
