"""Functions as tools: their JSON schemas, and the environment that calls them."""

from __future__ import annotations

import asyncio
import inspect
import re
import signal
import threading
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gspo.environments.protocol import Action, EnvironmentProblem, Message, Step, ToolCall
from gspo.types import Prompt

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}


class ToolError(Exception):
    """Raised by a tool for a failure that the model should see as it is written."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its JSON schema, and `run`, which gets the arguments of a call and returns the answer."""

    schema: Mapping[str, Any]
    run: Callable[[dict[str, Any]], Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]


def function_tool(function: Callable[..., Any], schema: Mapping[str, Any] | None = None) -> Tool:
    """A function as a tool. It may be async. Wrong arguments are a failure that the model sees."""
    schema = schema or schema_of(function)
    signature = inspect.signature(function)

    def run(arguments: dict[str, Any]) -> Any:
        if set(arguments) == {"input"} and "input" not in signature.parameters:
            arguments = {next(iter(signature.parameters), "input"): arguments["input"]}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{schema['function']['name']}: {error}") from None
        answer = function(**arguments)
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer

    return Tool(schema, run)


class ToolEnvironment:
    """Answers tool calls until a turn makes none, which ends the episode. It gives no reward.

    A call fails when its tool raises, when it has wrong arguments or an unknown name, or after `tool_timeout` seconds;
    the model sees the error as the tool's answer. A format that has one text per call passes it as the argument
    `input`.
    """

    tool_timeout: float | None = None

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]]) -> None:
        made = [tool if isinstance(tool, Tool) else function_tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        if not made:
            raise EnvironmentProblem("an environment of tools needs at least one function")
        if len(self._tools) < len(made):
            names = sorted(name for name, count in Counter(tool.name for tool in made).items() if count > 1)
            raise EnvironmentProblem(f"several tools have the name {', '.join(names)}; rename all but one")
        self.tools: Sequence[Mapping[str, Any]] = [tool.schema for tool in made]

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        return ()

    def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step(done=True)
        answers = [self._answer(call) for call in action.tool_calls]
        messages = [
            {"role": "tool", "name": call.name, "content": text} for call, (text, _) in zip(action.tool_calls, answers)
        ]
        return Step(messages, num_errors=sum(failed for _, failed in answers))

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """The text of a tool's answer, and whether the call failed."""
        try:
            return str(self._call(call)), False
        except (ToolError, ToolTimeout) as error:
            return f"error: {error}", True
        except MemoryError:
            return "error: out of memory", True
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}", True

    def _call(self, call: ToolCall) -> Any:
        if call.error is not None:
            raise ToolError(call.error)
        name = call.name or next(iter(self._tools))
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(self._tools)}")
        with deadline(self.tool_timeout):
            return tool.run(dict(call.arguments))


class ToolTimeout(BaseException):
    """A tool ran past its deadline. Not an Exception, so that a tool's own handlers let it pass."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise ToolTimeout in the block after `seconds`. Only a process's main thread can be interrupted."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise ToolTimeout(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function: from its annotations, and the texts of its docstring (with an `Args:` part)."""
    summary, texts = _read_docstring(inspect.getdoc(function) or "")
    hints = {name: _hint(function, hint) for name, hint in inspect.get_annotations(function).items()}
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = _type_schema(hints.get(name, str)) | ({"description": texts[name]} if name in texts else {})
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": summary, "parameters": parameters}
    return {"type": "function", "function": described}


def _hint(function: Callable[..., Any], hint: Any) -> Any:
    """The type that an annotation names; Any for a name that only a type checker imports."""
    named = types.SimpleNamespace(__annotations__={"it": hint})
    try:
        return typing.get_type_hints(named, getattr(function, "__globals__", {}))["it"]
    except NameError:
        return Any


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        present = [argument for argument in arguments if argument is not type(None)]
        return _type_schema(present[0]) if len(present) == 1 else {}
    if origin is typing.Literal:
        return {"type": _TYPES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (list, tuple) and arguments:
        return {"type": "array", "items": _type_schema(arguments[0])}
    return {"type": _TYPES[origin or hint]} if (origin or hint) in _TYPES else {}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before `Args:`, and the description of each argument."""
    summary, _, rest = text.partition("Args:")
    section = re.split(r"\n\s*(?:Returns|Raises|Yields|Examples?):", rest)[0]
    found = re.findall(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+(?:\n\s{8,}.+)*)", section, re.MULTILINE)
    return " ".join(summary.split()), {name: " ".join(description.split()) for name, description in found}
