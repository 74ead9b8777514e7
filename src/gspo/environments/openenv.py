"""`environment.name=openenv:URL`: a server of OpenEnv, spoken to by its wire format; no package of it is needed.

GET URL/schema describes actions; each episode is one WebSocket at URL/ws:

    {"type": "reset", "data": {"seed": …}}      ──▶
    {"type": "step", "data": {action}}          ──▶  {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "close"}                           ──▶
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.environments.formats import read_written_json
from gspo.environments.protocol import Action, EnvironmentProblem, Message, Step
from gspo.environments.shapes import MAX_DIGITS
from gspo.environments.websocket import WebSocket
from gspo.types import Prompt

HTTP_TIMEOUT = 30.0
_SCHEMAS: dict[str, dict[str, Any]] = {}  # of actions, by URL; known to forked workers


class OpenEnv:
    """One session of a server.

    An action with one field gets the turn's text, or its last whole number where the field is a number. Other actions
    are written as a JSON object. `action_field` and `observation_field` choose a field. An action that the server
    refuses is answered with an error that the model sees.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, url: str, action_field: str | None = None, observation_field: str | None = None) -> None:
        self._url = url.rstrip("/")
        if self._url not in _SCHEMAS:
            _SCHEMAS[self._url] = _fetch_schema(self._url)
        self._field, self._shown = _choose_field(_SCHEMAS[self._url], action_field), observation_field
        self._socket: WebSocket | None = None

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        self._socket = WebSocket("ws" + self._url.removeprefix("http") + "/ws")
        data = self._ask({"type": "reset", "data": {"seed": seed % 2**31}})
        return (self._message(data["observation"]),)

    def step(self, action: Action) -> Step:
        try:
            chosen = self._as_action(str(action))
            data = self._ask({"type": "step", "data": chosen})
        except _Refused as error:
            return Step(({"role": "user", "content": f"error: {error}"},), num_errors=1)
        reward = data.get("reward")
        return Step(
            (self._message(data["observation"]),), None if reward is None else float(reward), bool(data["done"])
        )

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception), contextlib.closing(self._socket):  # the server may be gone
                self._socket.send(json.dumps({"type": "close"}))
            self._socket = None

    def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None
        self._socket.send(json.dumps(message))
        reply = json.loads(self._socket.receive())
        data = reply.get("data") or {}
        if reply.get("type") != "error":
            return data
        if data.get("code") == "VALIDATION_ERROR":
            raise _Refused(f"{data.get('message')}: {json.dumps(data.get('errors', ''))}")
        raise RuntimeError(f"{self._url} answered with an error: {data.get('message')} ({data.get('code')})")

    def _as_action(self, text: str) -> dict[str, Any]:
        if self._field is None:
            try:
                found = read_written_json(text)
            except ValueError as error:
                raise _Refused(f"expected an action as a JSON object: {error}") from None
            if not isinstance(found, dict):
                raise _Refused("expected an action as a JSON object")
            return found
        name, kind = self._field
        if kind not in ("integer", "number"):
            return {name: text}
        numbers = re.findall(r"-?\d+", text)
        if not numbers or len(numbers[-1]) > MAX_DIGITS:
            raise _Refused("expected a number")
        return {name: int(numbers[-1])}

    def _message(self, observation: Mapping[str, Any]) -> Message:
        """An observation as text: the chosen field, the only text, or all fields as JSON."""
        if self._shown is not None:
            return {"role": "user", "content": str(observation[self._shown])}
        known = {name: value for name, value in observation.items() if value is not None}
        (only,) = known.values() if len(known) == 1 else (None,)
        return {"role": "user", "content": only if isinstance(only, str) else json.dumps(known, ensure_ascii=False)}


class _Refused(Exception):
    """An action that the server does not accept."""


def _fetch_schema(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=HTTP_TIMEOUT) as reply:
            return json.load(reply)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(
            f"environment.name=openenv:{url}: {type(error).__name__}: {error}; expected the URL of a running OpenEnv server"
        ) from error


def _choose_field(schema: Mapping[str, Any], chosen: str | None) -> tuple[str, str] | None:
    """The field of an action that a text goes into, and its type; None where an action has several."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    if chosen is not None and chosen not in fields:
        raise EnvironmentProblem(
            f"action_field={chosen!r} in environment.kwargs: the server's actions have {', '.join(fields)}"
        )
    required = [name for name in schema.get("required", ()) if name in fields]
    names = [chosen] if chosen is not None else required if len(required) == 1 else list(fields)
    return (names[0], str(fields[names[0]].get("type", "string"))) if len(names) == 1 else None
