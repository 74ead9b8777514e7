"""The function of an agent, found in a file and called with what it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gspo.environments.loading import import_file
from gspo.environments.protocol import EnvironmentProblem

KEY = "environment.agent"
OFFERED = ("data", "base_url", "http_client", "api_key")


def load_agent(place: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `path.py:name` names (`run` without a name). A class is made with `kwargs`, and its `run` used."""
    path, colon, name = place.rpartition(":")
    path, name = (path, name) if colon else (place, "run")
    found = getattr(import_file(path, KEY), name, None)
    if inspect.isclass(found):
        found = getattr(found(**kwargs), "run", None)
    if not callable(found):
        raise EnvironmentProblem(f"{KEY}={place!r}: {path} has no function {name!r}, or it is no class with `run`")
    positional, named = arguments_of(found, {}, dict.fromkeys(OFFERED[1:]))
    try:
        inspect.signature(found).bind(*positional, **named)
    except TypeError as error:
        expected = f"expected a function of {', '.join(OFFERED)}, at least of data"
        raise EnvironmentProblem(f"{KEY}={place!r}: {expected}; {error}") from None
    return found


def arguments_of(
    function: Callable[..., Any], data: Any, offered: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for an agent: the row first, then those of `offered` that it has parameters for."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters[1:]}
    return [data], {name: value for name, value in offered.items() if takes_all or name in named}


def wants(function: Callable[..., Any], name: str) -> bool:
    """Whether an agent has a parameter of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
