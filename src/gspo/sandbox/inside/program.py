"""Running the untrusted program inside its confined process: as a script, or as functions that are called."""

from __future__ import annotations

import atexit
import builtins
import hashlib
import importlib
import itertools
import linecache
import os
import random
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from . import plain

FILE_NAME = "program.py"
REQUESTS_FD, REPLIES_FD = 3, 4


def open_streams() -> None:
    """Open sys.stdin, stdout and stderr on the descriptors 0, 1 and 2 of this process."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def seed_randomness(source: str) -> None:
    """Seed `random` and numpy's global generator from the source, so that a program always gets the same verdict."""
    if "random" not in source:
        return
    digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
    random.seed(digest)
    if "numpy" in source and "numpy" in sys.modules:
        # numpy loads it when a program first uses it, and would then draw a seed of its own.
        importlib.import_module("numpy.random").seed(int.from_bytes(digest[:4], "little"))


def run_script(source: str) -> NoReturn:
    """Run the source as `__main__` and end the process as the interpreter would."""
    module = _module("__main__")
    _exit_like_python(_exit_code_of(lambda: exec(compile(source, FILE_NAME, "exec"), module.__dict__), source))


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__file__"] = FILE_NAME
    sys.modules[name] = module
    return module


def _exit_code_of(action: Any, source: str) -> int:
    """Run `action`. Returns the exit code that Python would end with; a traceback goes to stderr."""
    try:
        action()
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        linecache.cache[FILE_NAME] = (len(source), None, source.splitlines(True), FILE_NAME)
        traceback.print_exception(error)
        return 1
    return 0


def _exit_like_python(code: int) -> NoReturn:
    """End the process as the interpreter does, without the slow clearing of memory."""
    try:
        if threading.active_count() > 1:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        code = code or 120
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
    finally:
        os._exit(code)


class Callback:
    """A function of the tester that was passed to the program: a call sends a request to the tester."""

    def __init__(self, server: FunctionServer, number: int) -> None:
        self._server, self._number = server, number

    def __call__(self, *args: Any) -> Any:
        server = self._server
        server.send({"callback": self._number, "args": [server.encode(a) for a in args]})
        reply = plain.load_line(server.requests.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"][1])
        return server.decode(reply["ok"])


class FunctionServer:
    """Answers requests for the program's functions and objects. The judge treats its answers as data."""

    def __init__(self, source: str) -> None:
        self.requests = open(REQUESTS_FD, "rb", closefd=False)  # noqa: SIM115
        self.replies = open(REPLIES_FD, "wb", buffering=0, closefd=False)  # noqa: SIM115
        self.objects: list[Any] = []
        self.module = _module("solution")
        exec(compile(source, FILE_NAME, "exec"), self.module.__dict__)

    def send(self, message: Any) -> None:
        data = memoryview(plain.dump_line(message))
        while data:
            data = data[self.replies.write(data) :]

    def encode(self, value: Any) -> Any:
        return plain.encode(value, self._keep)

    def decode(self, data: Any) -> Any:
        return plain.decode(data, lambda tag, n: self.objects[n] if tag == "r" else Callback(self, n))

    def _keep(self, value: Any) -> list:
        self.objects.append(value)
        return ["r", len(self.objects) - 1]

    def loop(self) -> None:
        while line := self.requests.readline():
            try:
                answer = {"ok": self.answer(plain.load_line(line))}
            except Exception as error:
                answer = {"error": [type(error).__name__, str(error)[:1000]]}
            self.send(answer)

    def answer(self, request: dict) -> Any:
        if request["op"] == "names":
            return ["d", *[[name, self._kind(name)] for name in request["names"]]]
        target = self._target(request["target"])
        args = [self.decode(a) for a in request.get("args", ())]
        kwargs = {k: self.decode(v) for k, v in request.get("kwargs", {}).items()}
        if request["op"] == "call" and request.get("plain"):
            return plain.encode(target(*args, **kwargs))
        return self.encode(_OPERATIONS[request["op"]](target, args, kwargs))

    def _kind(self, name: str) -> str:
        value = self.module.__dict__.get(name, self)
        if value is self:
            return "missing"
        return "callable" if callable(value) else "value"

    def _target(self, target: Any) -> Any:
        if isinstance(target, list):
            return self.decode(target)
        scope = self.module.__dict__
        if target in scope:
            return scope[target]
        if "Solution" in scope and hasattr(scope["Solution"], target):
            return getattr(scope["Solution"](), target)
        raise NameError(f"name {target!r} is not defined by the program")


_OPERATIONS: dict[str, Any] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "value": lambda target, args, kwargs: target,
    "get": lambda target, args, kwargs: getattr(target, args[0]),
    "set": lambda target, args, kwargs: setattr(target, args[0], args[1]),
    "item": lambda target, args, kwargs: target[args[0]],
    "iter": lambda target, args, kwargs: list(itertools.islice(target, 100_000)),
    "len": lambda target, args, kwargs: len(target),
    "str": lambda target, args, kwargs: str(target),
}


def serve_functions(source: str) -> NoReturn:
    """Load the source as a module and answer calls until the requests end."""
    _exit_like_python(_exit_code_of(lambda: FunctionServer(source).loop(), source))
