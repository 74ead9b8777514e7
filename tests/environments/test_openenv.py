"""Texts as actions of an OpenEnv server and its observations as texts, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gspo.environments import openenv
from gspo.environments.openenv import OpenEnv
from gspo.environments.protocol import Action, EnvironmentProblem
from gspo.types import Prompt

URL = "http://127.0.0.1:1"


class Wire:
    """Answers every message with the next of `replies`."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self._replies = list(replies)
        self.place = ""
        self.closed = False

    def __call__(self, place: str) -> Wire:
        self.place = place
        return self

    def send(self, text: str) -> None:
        self.sent.append(json.loads(text))

    def receive(self) -> str:
        return json.dumps(self._replies.pop(0))

    def close(self) -> None:
        self.closed = True


def seen(observation: Any, **data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "done": False, **data}}


def session(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], *replies: Any, opening: Any = None, **options: Any
) -> tuple[Any, Wire]:
    wire = Wire(seen(opening or {"text": "begin"}), *replies)
    monkeypatch.setitem(openenv._SCHEMAS, URL, schema)
    monkeypatch.setattr(openenv, "WebSocket", wire)
    environment = OpenEnv(URL + "/", **options)
    assert environment.reset(Prompt("p", (), ()), seed=2**31 + 6)[0]["role"] == "user"
    return environment, wire


def fields(*names: str, kind: str = "string", **more: Any) -> dict[str, Any]:
    return {"properties": {name: {"type": kind} for name in names}, **more}


@pytest.mark.parametrize(
    ("schema", "options", "text", "action"),
    [
        (fields("message"), {}, "go 3", {"message": "go 3"}),
        (fields("message", "metadata"), {}, "go", {"message": "go"}),
        ({"properties": {"message": {}}}, {}, "go", {"message": "go"}),
        (fields("move", kind="integer"), {}, "not 4 but -3", {"move": -3}),
        (fields("move", kind="number"), {}, "2", {"move": 2}),
        (fields("move", kind="number"), {}, "7" * 18, {"move": int("7" * 18)}),
        (fields("a", "b", required=["b"]), {}, "go", {"b": "go"}),
        (fields("a", "b", required=["b"]), {"action_field": "a"}, "go", {"a": "go"}),
        (fields("a", "b"), {}, '{"a": 1, "b": 2}', {"a": 1, "b": 2}),
        (fields("a", "b", required=["a", "b"]), {}, '{"a": 1}', {"a": 1}),
        (fields("a", "metadata", required=["a", "metadata"]), {}, "go", {"a": "go"}),
    ],
)
def test_a_text_becomes_the_action_that_the_server_describes(monkeypatch, schema, options, text, action) -> None:
    environment, wire = session(monkeypatch, schema, seen({"text": "ok"}, reward=1, done=True), **options)
    step = environment.step(Action(text))
    assert wire.place == "ws://127.0.0.1:1/ws"
    assert wire.sent == [{"type": "reset", "data": {"seed": 6}}, {"type": "step", "data": action}]
    assert (step.reward, step.done, step.num_errors, step.messages[0]["content"]) == (1.0, True, 0, "ok")
    environment.close()
    environment.close()
    assert wire.sent[2:] == [{"type": "close"}] and wire.closed


@pytest.mark.parametrize(
    ("schema", "text", "says"),
    [
        (fields("move", kind="integer"), "left", "error: expected a number"),
        (fields("a", "b"), "go", "error: expected an action as a JSON object"),
        (fields("a", "b"), "[1]", "error: expected an action as a JSON object"),
        (fields("a", "b"), "[" * 100_000, "error: expected an action as a JSON object"),
        (fields("move", kind="integer"), "7" * 5000, "error: expected a number"),
    ],
)
def test_a_text_that_is_no_action_is_answered_without_the_server(monkeypatch, schema, text, says) -> None:
    environment, wire = session(monkeypatch, schema)
    step = environment.step(Action(text))
    (message,) = step.messages
    assert message["role"] == "user" and message["content"].startswith(says) and step.num_errors == 1
    assert (step.reward, step.done, len(wire.sent)) == (None, False, 1)


@pytest.mark.parametrize(
    ("observation", "options", "text"),
    [
        ({"text": "é", "none": None}, {}, "é"),
        ({"size": 3}, {}, '{"size": 3}'),
        ({"text": "é", "size": 3}, {}, '{"text": "é", "size": 3}'),
        ({"text": "a", "size": 3}, {"observation_field": "size"}, "3"),
    ],
)
def test_an_observation_is_its_only_text_the_chosen_field_or_all_of_it(monkeypatch, observation, options, text) -> None:
    environment, _ = session(monkeypatch, fields("message"), seen(observation), opening=observation, **options)
    step = environment.step(Action("go"))
    assert (step.messages[0]["content"], step.reward, step.done) == (text, None, False)


def test_what_a_server_refuses_is_an_answer_and_what_breaks_is_a_failure(monkeypatch) -> None:
    refused = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no", "errors": [1]}}
    broken = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "gone"}}
    environment, _ = session(monkeypatch, fields("message"), refused, broken)
    step = environment.step(Action("go"))
    assert (step.messages[0]["content"], step.num_errors, step.done) == ("error: no: [1]", 1, False)
    with pytest.raises(RuntimeError, match=r"answered with an error: gone \(EXECUTION_ERROR\)"):
        environment.step(Action("go"))
    with pytest.raises(EnvironmentProblem, match=r"action_field='x' .* the server's actions have message"):
        session(monkeypatch, fields("message"), action_field="x")


def test_an_episode_whose_server_is_gone_can_be_closed(monkeypatch) -> None:
    environment, wire = session(monkeypatch, fields("message"))

    def fail(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(wire, "send", fail)
    environment.close()
    assert wire.closed
