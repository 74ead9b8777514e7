"""The second confined process of assert-style tests: it runs the text of the test and calls the program remotely."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
from typing import Any, NoReturn

from . import plain
from .program import REPLIES_FD, REQUESTS_FD


class ProgramConnection:
    """Sends requests to the program's process, through the judge, and answers the callbacks that it makes meanwhile."""

    def __init__(self) -> None:
        self._in = open(REQUESTS_FD, "rb", closefd=False)  # noqa: SIM115
        self._out = open(REPLIES_FD, "wb", closefd=False)  # noqa: SIM115
        self._functions: list[Any] = []

    def send(self, message: Any) -> None:
        self._out.write(plain.dump_line(message))
        self._out.flush()

    def request(self, op: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        encoded = {k: self._encode(v) for k, v in kwargs.items()}
        self.send({"op": op, "target": target, "args": [self._encode(a) for a in args], "kwargs": encoded})
        while True:
            reply = plain.load_line(self._in.readline(), plain.MAX_BYTES)
            if "callback" not in reply:
                return self._result(reply)
            self.send(self._call_back(reply))

    def name_kinds(self, names: list[str]) -> dict[str, str]:
        self.send({"op": "names", "names": names})
        return self._result(plain.load_line(self._in.readline(), plain.MAX_BYTES))

    def _result(self, reply: dict) -> Any:
        if "error" in reply:
            name, message = reply["error"]
            kind = getattr(builtins, str(name), None)
            # Within `all(map(...))`, StopIteration would end the test early, as if the rest had passed.
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
                raise kind(message)
            raise RuntimeError(message)
        return plain.decode(reply["ok"], lambda tag, number: RemoteObject(self, ["r", number]))

    def _call_back(self, request: dict) -> dict:
        try:
            args = [plain.decode(a, lambda tag, number: RemoteObject(self, ["r", number])) for a in request["args"]]
            return {"ok": self._encode(self._functions[request["callback"]](*args))}
        except Exception as error:
            return {"error": [type(error).__name__, str(error)[:1000]]}

    def _encode(self, value: Any) -> Any:
        return plain.encode(value, self._encode_reference)

    def _encode_reference(self, value: Any) -> list:
        if type(value) is RemoteObject:
            return value._target if isinstance(value._target, list) else self._reference_to(value._target)
        if not callable(value):
            raise plain.NotPlain(f"a test cannot pass {type(value).__name__} to the program")
        self._functions.append(value)
        return ["k", len(self._functions) - 1]

    def _reference_to(self, name: str) -> list:
        value = self.request("value", name)
        return value._target if type(value) is RemoteObject else self._encode(value)


class RemoteObject:
    """An object in the program's process. Its methods can be called, but it does not decide whether it equals another."""

    def __init__(self, connection: ProgramConnection, target: Any) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_target", target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._connection.request("call", self._target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._connection.request("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._connection.request("set", self._target, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._connection.request("item", self._target, key)

    def __iter__(self) -> Any:
        return iter(self._connection.request("iter", self._target))

    def __len__(self) -> int:
        return _exactly(int, self._connection.request("len", self._target))

    def __str__(self) -> str:
        return _exactly(str, self._connection.request("str", self._target))

    def __bool__(self) -> bool:
        raise TypeError("the truth of a program's own object proves nothing")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a program's own object does not decide equality")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None  # type: ignore[assignment]


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value


def run_test(text: str) -> NoReturn:
    """Run a test, whose first line may name the function under test; send the verdict to the judge and exit."""
    connection = ProgramConnection()
    name, _, source = text.partition("\n")
    try:
        exec(compile(source, "test.py", "exec"), _test_globals(source, name, connection))
        verdict: dict[str, Any] = {"verdict": True}
    except BaseException as error:
        verdict = {"verdict": False, "why": f"{type(error).__name__}: {error}"[:1000]}
    connection.send(verdict)
    os._exit(0)


def _test_globals(source: str, tested: str, connection: ProgramConnection) -> dict[str, Any]:
    """The test's globals: real modules by their names; from the program, `tested` or what `program_names` selects."""
    tree = ast.parse(source)
    scope: dict[str, Any] = {"__builtins__": builtins, "__name__": "test"}
    for name in _module_names(tree):
        scope[name] = importlib.import_module(_ALIASES.get(name, name))
    wanted = [tested] if tested else sorted(program_names(tree))
    name_kinds = connection.name_kinds(wanted)
    # Only the requested names: the program wrote the reply, and could add its own `abs` or `math`.
    for name in wanted:
        if name_kinds.get(name) == "callable":
            scope[name] = RemoteObject(connection, name)
        elif name_kinds.get(name) == "value":
            scope[name] = connection.request("value", name)
    return scope


_ALIASES = {"np": "numpy"}


def program_names(tree: ast.AST) -> set[str]:
    """The names that a test uses from the program: those that neither the test nor Python defines.

    With built-ins and modules from the program, its own `set` or `math` could make any comparison true. Only a test
    that uses no other name is about a function with the name of a built-in.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used -= _defined_names(tree) | _module_names(tree)
    own = {name for name in used if not hasattr(builtins, name)}
    return own or {name for name in used if name in _called_names(tree)}


def _defined_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _called_names(tree: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def _module_names(tree: ast.AST) -> set[str]:
    bases = {n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    known = {name for name in bases if name in sys.stdlib_module_names or name in _ALIASES}
    return known - _called_names(tree) - _defined_names(tree)
