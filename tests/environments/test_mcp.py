"""Calls of tools of an MCP server: what is sent, what an answer becomes, and a server that ends. The server is in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.environments import mcp
from gspo.environments.protocol import Action, EnvironmentProblem, ToolCall
from gspo.types import Prompt

PROMPT = Prompt("p", (), ())


class Closed(Exception):
    """What the package raises when the connection has ended."""

    code = -32000


class Server:
    """A client of the package. `answers` are given one after another; an exception is raised."""

    opened: list[Server] = []
    answers: list[Any] = []

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_open = self.was_cancelled = False

    async def __aenter__(self) -> Server:
        self.is_open = True
        Server.opened.append(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_open = False

    async def list_tools(self, cursor: str | None) -> Any:
        names = {None: ["plain", "named"], "more": ["bare"]}[cursor]
        schemas = {"plain": {"properties": {"word": {}, "n": {}}}, "named": {"properties": {"a": {}, "input": {}}}}
        tools = [SimpleNamespace(name=n, description=None, input_schema=schemas.get(n, {})) for n in names]
        return SimpleNamespace(tools=tools, next_cursor="more" if cursor is None else None)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.calls.append((name, arguments))
        answer = Server.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        texts, failed = answer
        return SimpleNamespace(content=[SimpleNamespace(text=t) for t in texts], is_error=failed)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mcp.McpServer, "_connect", lambda self: Server())
    monkeypatch.setattr(mcp, "_TOOLS", {})
    servers: dict[Any, mcp.McpServer] = {}
    monkeypatch.setattr(mcp, "_SERVERS", servers)
    monkeypatch.setattr(Server, "opened", [])
    yield
    for server in servers.values():
        if server.is_alive:
            server.close()


def answers(environment: Any, *given: Any, calls: list[ToolCall] | None = None) -> list[tuple[str, bool]]:
    Server.answers = list(given)
    found = []
    for call in calls or [ToolCall("plain", {"word": "x"})]:
        step = environment.step(Action("", [call]))
        found.append((step.messages[0]["content"], bool(step.num_errors)))
    return found


def test_all_pages_of_tools_are_listed_over_a_connection_that_is_closed_again() -> None:
    first = mcp.McpTools("server")
    assert [tool["function"]["name"] for tool in first.tools] == ["plain", "named", "bare"]
    assert first.tools[0]["function"]["description"] == ""
    assert [server.is_open for server in Server.opened] == [False]
    mcp.McpTools("server")
    assert len(Server.opened) == 1, "the tools of a target are asked for once"
    mcp.McpTools("another")
    assert len(Server.opened) == 2


def test_episodes_share_a_connection_and_texts_and_errors_are_answers() -> None:
    one, two = mcp.McpTools("server"), mcp.McpTools("server")
    one.reset(PROMPT, 0)
    two.reset(PROMPT, 1)
    assert len(Server.opened) == 2, "one for the tools, one for the episodes"
    assert answers(one, (["a", None, "", "b"], False)) == [("a\n\nb", False)]
    assert answers(two, (["no such word"], True)) == [("error: no such word", True)]
    assert answers(two, ValueError("odd")) == [("error: ValueError: odd", True)]
    assert len(Server.opened) == 2 and len(Server.opened[1].calls) == 3


def test_a_single_text_is_the_first_argument_unless_there_is_one_of_its_name() -> None:
    environment = mcp.McpTools("server")
    calls = [ToolCall(name, {"input": "x"}) for name in ("plain", "named", "bare", "")]
    answers(environment, *[([""], False)] * 5, calls=[*calls, ToolCall("plain", {"input": "x", "n": 2})])
    assert Server.opened[1].calls == [
        ("plain", {"word": "x"}),
        ("named", {"input": "x"}),
        ("bare", {"input": "x"}),
        ("plain", {"word": "x"}),
        ("plain", {"input": "x", "n": 2}),
    ]


def test_a_server_that_ends_is_replaced_and_asked_once_more() -> None:
    environment = mcp.McpTools("server")
    environment.reset(PROMPT, 0)
    assert answers(environment, Closed(), (["again"], False)) == [("again", False)]
    assert [server.is_open for server in Server.opened] == [False, False, True]
    assert Server.opened[1].calls == Server.opened[2].calls == [("plain", {"word": "x"})]
    assert answers(environment, Closed(), Closed()) == [("error: the MCP server ended during the call", True)]
    assert answers(environment, (["well"], False)) == [("well", False)]
    assert [server.is_open for server in Server.opened] == [False, False, False, False, True]


def test_a_call_past_its_deadline_leaves_the_connection_open() -> None:
    environment = mcp.McpTools("server")
    environment.reset(PROMPT, 0)
    environment.tool_timeout = 0.05
    assert answers(environment, None) == [("error: no answer within 0.05 s", True)]
    assert answers(environment, (["well"], False)) == [("well", False)]
    assert [server.is_open for server in Server.opened] == [False, True] and Server.opened[1].was_cancelled


def test_a_server_that_cannot_be_reached_is_a_problem_with_its_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [OSError("refused"), ValueError("late")])])

    monkeypatch.setattr(mcp.McpServer, "_connect", fail)
    with pytest.raises(EnvironmentProblem, match="mcp:server cannot be reached: refused"):
        mcp.McpTools("server")
