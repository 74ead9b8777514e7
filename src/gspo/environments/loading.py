"""Environments by name or by path, and the registry through which a user adds one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gspo.environments.protocol import Environment, EnvironmentProblem
from gspo.environments.shapes import as_environment
from gspo.environments.tools import ToolEnvironment
from gspo.environments.verl import load_tools, tool_functions
from gspo.plugins import import_plugins
from gspo.registry import Registry, import_name
from gspo.rewards.functions import load_module
from gspo.rewards.protocol import RewardError

Make = Callable[[], Environment]
_HOME = "gspo.environments.builtin"
ENVIRONMENTS: Registry[Callable[..., Any]] = Registry(
    "environment.name",
    {
        "calculator": f"{_HOME}:Calculator",
        "gridworld": f"{_HOME}:GridWorld",
        "gsm8k": f"{_HOME}:PythonTool",
        "guess": f"{_HOME}:Guess",
        "python": f"{_HOME}:PythonTool",
    },
    error=EnvironmentProblem,
)
# Environments of other packages, by the word before the colon of `environment.name`; the rest is their first argument.
SCHEMES = {
    "mcp": "gspo.environments.mcp:McpTools",
    "openenv": "gspo.environments.openenv:OpenEnv",
    "textarena": "gspo.environments.textarena:TextArena",
}


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Where an environment is: a registered name, `SCHEME:REST`, a name in a Python file or module, or files of tools.

    Only plain values, so that it can be sent to a worker; `made` is an object of this process that replaces the names.
    """

    name: str | None = None
    path: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function_tool_path: str | None = None
    tool_config_path: str | None = None
    plugins: tuple[str, ...] = ()
    made: Any = None

    @property
    def title(self) -> str:
        """What messages call the environment."""
        if self.made is not None:
            return getattr(self.made, "__name__", type(self.made).__name__)
        return self.name or self.path or self.tool_config_path or self.function_tool_path or ""


def environment(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an environment, a class or a function that returns one, under a name for `environment.name`."""
    return ENVIRONMENTS.register(name)


def load_environment(spec: EnvironmentSpec) -> Make:
    """A function that makes a new episode's environment; EnvironmentProblem when it cannot be found or made."""
    found = find_named(spec)
    title = spec.title
    if not isinstance(found, list) and not callable(found):
        raise EnvironmentProblem(
            f"environment {title!r} is a single object of type {type(found).__name__}; every episode needs one of its own: "
            "name a class, or a function that returns an environment"
        )

    def make() -> Environment:
        return as_environment(found if isinstance(found, list) else found(**spec.kwargs), title)

    return make


def find_named(spec: EnvironmentSpec) -> Any:
    """The class, factory or list of functions that a spec names."""
    if spec.made is not None:
        return spec.made
    if spec.tool_config_path is not None or spec.function_tool_path is not None:
        path, key = spec.function_tool_path, "rollout.multi_turn.function_tool_path"
        return load_tools(spec.tool_config_path, None if path is None else lambda: import_file(path, key))
    if spec.path is None:
        assert spec.name is not None
        import_plugins(spec.plugins)
        scheme, colon, rest = spec.name.partition(":")
        if colon and scheme in SCHEMES:
            kind = import_name(SCHEMES[scheme])
            return functools.update_wrapper(functools.partial(kind, rest), kind, assigned=("__doc__",), updated=())
        return ENVIRONMENTS.find(spec.name)
    module = import_file(spec.path, "environment.path")
    if spec.name is None:
        return _only_environment(module, spec.path)
    found = getattr(module, spec.name, None)
    if found is None:
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise EnvironmentProblem(f"environment.path={spec.path!r} has no {spec.name!r}; it has {', '.join(names[:20])}")
    return found


def import_file(path: str, key: str) -> ModuleType:
    """The module of a file or importable name that a key gives."""
    try:
        return load_module(path, key)
    except RewardError as error:
        raise EnvironmentProblem(str(error)) from error


def _only_environment(module: ModuleType, path: str) -> Any:
    """The one class of a file that has `reset` and `step`; without any, its functions as tools."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    classes = [value for value in own if inspect.isclass(value) and hasattr(value, "reset")]
    if len(classes) == 1:
        return classes[0]
    if classes:
        names = ", ".join(each.__name__ for each in classes)
        raise EnvironmentProblem(f"environment.path={path!r} has several environments ({names}); set environment.name")
    functions = tool_functions(module)
    return lambda **_: ToolEnvironment(functions)
