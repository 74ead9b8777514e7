"""verl's tools: functions under `@function_tool`, and classes of `BaseTool` that a YAML file names (`tool_config_path`).

Files that import `verl.tools` work with verl installed and without it: then the few names that tools use are provided.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from gspo import untrusted
from gspo.environments.protocol import Action, EnvironmentProblem, Message, Step
from gspo.environments.tools import Tool, ToolEnvironment, function_tool, schema_of
from gspo.paths import user_path
from gspo.registry import import_name
from gspo.types import Prompt

KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
_MARK = "_verl_tool"  # on a function: its name and schema


class VerlTools(ToolEnvironment):
    """Serves tools with `create`, `execute` and `release`, and plain functions beside them.

    An instance is created when the model first calls its tool, with the row's `tools_kwargs`, and released with the
    episode. What tools return as rewards is logged as the metric `tool_reward`; the reward function grades the answer.
    """

    def __init__(self, lasting: Sequence[Any], functions: Sequence[Callable[..., Any]] = ()) -> None:
        own = [Tool(_plain(tool.tool_schema), self._runner(tool)) for tool in lasting]
        super().__init__([*own, *(self._counted(function) for function in functions)])
        self._instances: dict[str, tuple[Any, Any]] = {}  # tool and instance id by name
        self._row: Mapping[str, Any] = {}
        self._reward = 0.0

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        self._row = prompt.extra
        return ()

    def step(self, action: Action) -> Step:
        step = super().step(action)
        return Step(
            step.messages, step.reward, step.done, metrics={"tool_reward": self._reward}, num_errors=step.num_errors
        )

    def close(self) -> None:
        instances, self._instances = self._instances, {}
        for tool, instance in instances.values():
            asyncio.run(tool.release(instance))

    def _runner(self, tool: Any) -> Callable[[dict[str, Any]], str]:
        def run(arguments: dict[str, Any]) -> str:
            return self._note(asyncio.run(self._execute(tool, arguments)))

        return run

    async def _execute(self, tool: Any, arguments: dict[str, Any]) -> Any:
        if tool.name not in self._instances:
            own = (self._row.get("tools_kwargs") or {}).get(tool.name) or {}  # columns of a table may be None
            options = own.get("create_kwargs") or {}
            made = await tool.create(**_accepted(tool.create, {**options, "create_kwargs": options}))
            self._instances[tool.name] = tool, made[0] if isinstance(made, tuple) else made
        return await tool.execute(self._instances[tool.name][1], arguments)

    def _counted(self, function: Callable[..., Any]) -> Tool:
        name, schema = getattr(function, _MARK, (function.__name__, None))
        made = function_tool(function, schema or _named(schema_of(function), name))
        return Tool(made.schema, lambda arguments: self._note(made.run(arguments)))

    def _note(self, answer: Any) -> str:
        """The text of an answer; a reward that comes with it is added up."""
        response, reward, *_ = (*answer, 0.0) if isinstance(answer, tuple) else (answer, 0.0)
        self._reward += float(reward or 0.0)
        if isinstance(response, dict):
            return json.dumps(response, ensure_ascii=False)
        text = getattr(response, "text", response)
        return "" if text is None else str(text)


def load_tools(config_path: str | None, function_module: Callable[[], ModuleType] | None) -> Callable[..., VerlTools]:
    """A factory of episodes with the tools of a YAML file and of a file of functions."""
    with standing_in():
        lasting = _configured(user_path(config_path)) if config_path is not None else []
        functions = tool_functions(function_module()) if function_module is not None else []
    return lambda **_: VerlTools(lasting, functions)


def tool_functions(module: ModuleType) -> list[Callable[..., Any]]:
    """The decorated functions of a file, or all its public ones."""
    own = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    registered = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    for tool in registered.values():
        if tool.fn in own:
            setattr(tool.fn, _MARK, (tool.name, _plain(tool.tool_schema)))
    found = [function for function in own if hasattr(function, _MARK)] or own
    if not found:
        raise EnvironmentProblem(f"{module.__file__}: no functions to use as tools")
    return found


def _configured(path: Path) -> list[Any]:
    """The tools that a YAML file describes: `tools: [{class_name, config, tool_schema}]`."""
    try:
        listed = untrusted.read_yaml(path)["tools"]
        return [_make(entry) for entry in listed]
    except (OSError, untrusted.Unreadable, KeyError, TypeError, ImportError, AttributeError) as error:
        raise EnvironmentProblem(
            f"{KEY}={path}: {type(error).__name__}: {error}; expected `tools`, a list with class_name, config and tool_schema"
        ) from error


def _make(entry: Mapping[str, Any]) -> Any:
    module, _, name = str(entry["class_name"]).rpartition(".")
    made = import_name(f"{module}:{name}")
    schema = entry.get("tool_schema")
    return made(config=dict(entry.get("config") or {}), tool_schema=None if schema is None else as_schema(schema))


def as_schema(value: Any) -> Any:
    """A JSON schema as verl's tools expect it: with attributes, and `model_dump`."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(value)
    return _Schema(value)


class _Schema(SimpleNamespace):
    """A mapping whose items are attributes."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        super().__init__(**{k: _Schema(v) if isinstance(v, Mapping) else v for k, v in value.items()})
        self._value = value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(self._value)

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> _Schema:
        return cls(value)


def _plain(schema: Any) -> dict[str, Any]:
    return dict(schema) if isinstance(schema, Mapping) else schema.model_dump(exclude_unset=True, exclude_none=True)


def _named(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {**schema, "function": {**schema["function"], "name": name}}


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values for which a function has a parameter."""
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    return {name: value for name, value in values.items() if everything or name in names}


class BaseTool:
    """What verl's class of this name gives to tools: `config`, `tool_schema`, `name`, and instances without state."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Nothing is held."""


class ToolResponse(SimpleNamespace):
    """What a tool answers: `text`."""

    def __init__(self, text: str | None = None, **others: Any) -> None:
        super().__init__(text=text, **others)


def mark_tool(name: Any = None, *, schema: Any = None) -> Any:
    """verl's `function_tool`: with or without parentheses, a name and a schema."""

    def mark(function: Callable[..., Any], chosen: str | None) -> Callable[..., Any]:
        setattr(function, _MARK, (chosen or function.__name__, None if schema is None else _plain(schema)))
        return function

    return mark(name, None) if callable(name) else lambda function: mark(function, name)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Provide `verl.tools` while a file is imported, where verl is not installed."""
    if importlib.util.find_spec("verl") is not None:
        yield
        return
    contents = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool, "ToolResponse": ToolResponse},
        "verl.tools.schemas": {"ToolResponse": ToolResponse, "OpenAIFunctionToolSchema": _Schema},
        "verl.tools.function_tool": {"function_tool": mark_tool},
    }
    for name, names in contents.items():
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(names)
    try:
        yield
    finally:
        for name in contents:
            del sys.modules[name]
