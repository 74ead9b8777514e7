"""The fork server of the reward pool and its workers: `python -m gspo.rewards.pool.fork_server FD`.

The trainer has torch and threads, so it cannot fork safely. It starts this program once, which imports the reward
function once and forks a worker within a few milliseconds of each request.

    trainer ── control socket: "start", "stop PID" ──▶ fork server ── fork, kill, reap ──▶ worker
       │         (waits for each reply)                 (waits for a request)                │
       └──── the worker's own socket: payload ──▶ ◀── result, or the socket closes ─────────┘

Only the server reaps workers, when the trainer requests it: until then a worker's process id is not reused. When the
control socket closes, the trainer has ended, and the server kills all workers and ends. A worker dies with its server
(PR_SET_PDEATHSIG). Processes that a worker leaves behind become children of the server (subreaper), which kills them.
The server itself uses PR_SET_PDEATHSIG only while it imports user code: the signal is tied to the trainer's *thread*,
which may end before the pool does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import glob
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo.processes import adopt_orphans, children_of, describe_exit, die_with_parent, kill_group, outlive_parent
from gspo.registry import import_name
from gspo.rewards.pool import frames

Handler = Callable[[Any], Any]

_PARENT_CHECK = 2.0
EXPLAINED = ("RewardError", "EnvironmentProblem", "PluginError")  # errors whose message says all
MAX_STARTS = 64  # in one request: a message carries at most 253 descriptors


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """The first message to a server. `factory` ("module:function") called with `args` returns (handler, info)."""

    factory: str
    args: tuple[Any, ...]
    memory: int  # MiB per worker
    path: tuple[str, ...]
    preload: bool = True  # load the handler before forking; else in each worker

    def load(self) -> tuple[Handler, Any]:
        """The function that turns payloads into results, and what the trainer must know about it."""
        return import_name(self.factory)(*self.args)


def main(control_fd: int) -> None:
    """Serve start and stop requests until the trainer closes the control socket."""
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    adopt_orphans()
    if not die_with_parent(parent):
        return
    try:
        setup: ServerSetup = pickle.loads(frames.receive(control))
        sys.path[:] = setup.path
        handler = _preload(control, setup) if setup.preload else _try_in_child(control, setup)
    except (Exception, SystemExit) as error:
        text = str(error) if type(error).__name__ in EXPLAINED else traceback.format_exc(limit=-12)
        frames.send(control, json.dumps({"error": text}).encode())
        return
    outlive_parent()
    gc.freeze()  # keeps the pages shared with the workers
    _serve_requests(control, parent, setup, handler)


def _preload(control: socket.socket, setup: ServerSetup) -> Handler:
    """Load the handler here and report its info, with the number of threads that the imports started."""
    handler, info = setup.load()
    num_threads = len(glob.glob("/proc/self/task/*"))
    frames.send(control, json.dumps({"info": info, "threads": num_threads}).encode())
    return handler


def _try_in_child(control: socket.socket, setup: ServerSetup) -> None:
    """Have a child load the function and report: workers could not import again what this process has imported."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if die_with_parent(server):
                _preload(control, setup)
                status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise RuntimeError(f"the process that loads the reward function {describe_exit(code)}")


def _serve_requests(control: socket.socket, parent: int, setup: ServerSetup, handler: Handler | None) -> None:
    workers: set[int] = set()
    try:
        # A process that was forked from the trainer may hold the socket open after its death: check the parent too.
        while os.getppid() == parent:
            readable = select.select([control], [], [], _PARENT_CHECK)[0]
            if readable and not _handle_request(control, workers, setup, handler):
                break
    finally:
        for pid in list(workers):
            _stop(pid, workers)
        _kill_orphans(workers)


def _handle_request(control: socket.socket, workers: set[int], setup: ServerSetup, handler: Handler | None) -> bool:
    """Serve one request; False when the trainer is gone."""
    try:
        request, fds, _, _ = socket.recv_fds(control, 256, 2 * MAX_STARTS)
        if not request:
            return False
        verb, _, argument = request.decode().partition(" ")
        if verb == "start":
            pids = [_fork_worker(control, setup, handler, fds, i) for i in range(0, len(fds), 2)]
            workers.update(pids)
            reply = json.dumps(pids)
        else:
            reply = _stop(int(argument), workers)
        for fd in fds:
            os.close(fd)
        frames.send(control, reply.encode())
    except OSError:
        return False
    return True


def _stop(pid: int, workers: set[int]) -> str:
    """Kill a worker and every process that it started. Returns how the worker ended."""
    if pid not in workers:
        return "ended with an earlier reward server"
    kill_group(pid)
    _, status = os.waitpid(pid, 0)
    workers.discard(pid)
    _kill_orphans(workers)
    return describe_exit(os.waitstatus_to_exitcode(status))


def _kill_orphans(workers: set[int]) -> None:
    """Kill the server's children that are not workers: processes that dead workers left behind."""
    for _ in range(64):  # the children of a killed orphan become this process's own, and are found in the next round
        orphans = [pid for pid in children_of(os.getpid()) if pid not in workers]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork_worker(
    control: socket.socket, setup: ServerSetup, handler: Handler | None, fds: list[int], first: int
) -> int:
    """Fork a worker that talks on `fds[first]` and writes its stack to the next; it closes the other descriptors."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        control.close()
        for fd in fds[:first] + fds[first + 2 :]:
            os.close(fd)
        _confine(server, setup.memory)
        with open(fds[first + 1], "w", buffering=1) as stack_file:
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True, chain=False)
            sock = socket.socket(fileno=fds[first])
            if handler is None:
                handler, _ = setup.load()
                frames.send(sock, b"{}")  # ready
            run_jobs(sock, handler)
        status = 0
    except (EOFError, ConnectionError):  # the pool has closed the socket
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _confine(server: int, memory: int) -> None:
    """Own process group, death with the server, no core file, a memory limit, first choice of the OOM killer."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if not die_with_parent(server):
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Private writable memory, not address space: libraries reserve far more addresses than they use. The hard limit
    # stays, since the sandbox of code rewards sets other limits for its processes.
    resource.setrlimit(resource.RLIMIT_DATA, (memory << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def run_jobs(sock: socket.socket, handler: Handler) -> None:
    """Answer payloads one at a time until the other side closes the socket. The answers are JSON, never pickles."""
    while True:
        payload = pickle.loads(frames.receive(sock))
        try:
            answer = {"result": handler(payload)}
        except (Exception, SystemExit):
            answer = {"error": traceback.format_exc(limit=-12)}
        frames.send(sock, json.dumps(answer).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
