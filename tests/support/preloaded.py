"""Python programs that start at once: forked from a process that has loaded torch, transformers and gspo already.

A test that runs a program uses `preloaded_python()` where it would use `sys.executable`. The result is a small program
that takes `-m MODULE …`, `-c CODE …` or `FILE …`, hands its arguments, folder, environment and streams to the loaded
process, passes signals on, and ends as the forked program does. Loading the libraries costs seven seconds of CPU; a
fork none of them.

When the small program is killed from outside, the forked one is killed a moment later: a test that goes on from there
reads the program's output to its end first.
"""

from __future__ import annotations

import array
import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

LOADED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "safetensors.torch"),
    *("transformers.models.llama.modeling_llama", "gspo.loop.trainer", "gspo.loop.supervised", "gspo.cli"),
)
CLIENT = """
import array, json, os, signal, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
words = json.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "environ": dict(os.environ)}).encode()
sock.sendmsg([len(words).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
sock.sendall(words)
pid = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
status = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.WEXITSTATUS(status))
"""


@functools.cache
def preloaded_python() -> str:
    """The program to use in place of `sys.executable`. The first call of a test process loads the libraries."""
    folder = Path(tempfile.mkdtemp(prefix="gspo-loaded-"))
    (folder / "client.py").write_text(CLIENT)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{folder}/client.py" "{folder}/socket" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder / "socket")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # it ends when this process does
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(server.kill)
    return str(program)


def serve(path: str) -> None:
    """Load the libraries, then fork a program for every connection, until the standard input ends."""
    for name in LOADED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:  # one process waits for one program
            listener.close()
            os._exit(_accompany(connection))
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _accompany(connection: socket.socket) -> int:
    """Run the program that a client asks for and tell the client how it ended; kill it when the client is gone."""
    fds = array.array("i")
    size, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * fds.itemsize))
    for _, _, data in ancillary:
        fds.frombytes(data)
    asked = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(asked, fds)
    for fd in (0, *fds):
        os.close(fd)
    connection.sendall(pid.to_bytes(4, "big"))

    def watch() -> None:
        if not connection.recv(1):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.sendall(status.to_bytes(4, "big"))
    return 0


def _become(asked: dict[str, Any], fds: array.array[int]) -> None:
    """Turn this process into the program. Does not return."""
    code = 1
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
            os.close(fd)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environ"])
        own = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        kind, sys.argv = asked["argv"][0], asked["argv"][1:]
        if kind == "-m":
            sys.path[:] = [asked["cwd"], *own, *sys.path[1:]]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path[:] = [asked["cwd"], *own, *sys.path[1:]]
            program, sys.argv[0] = sys.argv[0], "-c"
            exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv.insert(0, kind)
            sys.path[:] = [str(Path(kind).resolve().parent), *own, *sys.path[1:]]
            runpy.run_path(kind, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    serve(sys.argv[1])
