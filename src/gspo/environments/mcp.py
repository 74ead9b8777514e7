"""`environment.name=mcp:COMMAND` or `mcp:URL`: the tools of a server that speaks the Model Context Protocol.

    episodes of a worker ── call_tool ──▶ McpServer ── thread with an event loop ──▶ server
      (main thread, waits)                               (stdio, or HTTP for a URL)

Each worker process has one connection, which its episodes share; a stdio server ends when its worker does.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from gspo.environments.protocol import EnvironmentProblem, Message
from gspo.environments.tools import Tool, ToolEnvironment, ToolError
from gspo.types import Prompt

START_TIMEOUT = 60.0
_CONNECTION_CLOSED = -32000  # mcp_types.CONNECTION_CLOSED
_SERVERS: dict[tuple[int, str], McpServer] = {}  # by process and target: a forked process has connections of its own
_TOOLS: dict[str, list[dict[str, Any]]] = {}  # by target; known to forked workers


class ServerEnded(ToolError):
    """The server ended before it answered."""


class McpTools(ToolEnvironment):
    """The tools of a server, without state between episodes. A tool that answers with an error failed.

    A server that has ended is replaced, and the call that found out is made once more.
    """

    def __init__(self, target: str, env: dict[str, str] | None = None) -> None:
        if target not in _TOOLS:
            _TOOLS[target] = _ask_for_tools(target, env)
        super().__init__([Tool(schema, self._runner(schema["function"]["name"])) for schema in _TOOLS[target]])
        self._target, self._env = target, env

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        self._server()  # connecting is not part of a call, which has a deadline
        return ()

    def _runner(self, name: str) -> Any:
        def run(arguments: dict[str, Any]) -> str:
            try:
                return self._server().call(name, arguments)
            except ServerEnded:
                return self._server().call(name, arguments)

        return run

    def _server(self) -> McpServer:
        """The connection of this process, made when it is first needed."""
        place = os.getpid(), self._target
        server = _SERVERS.get(place)
        if server is None or not server.is_alive:
            server = _SERVERS[place] = McpServer(self._target, self._env)
        return server


def _ask_for_tools(target: str, env: dict[str, str] | None) -> list[dict[str, Any]]:
    """The schemas of a server's tools. The connection is closed again: this process may be forked."""
    server = McpServer(target, env)
    try:
        return server.tools()
    finally:
        server.close()


class McpServer:
    """An open connection, usable from threads that have no event loop."""

    def __init__(self, target: str, env: dict[str, str] | None = None) -> None:
        self._target, self._env = target, env
        self._loop = asyncio.new_event_loop()
        self._client: Future[Any] = Future()
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        try:
            self._client.result(START_TIMEOUT)
        except Exception as error:
            raise EnvironmentProblem(f"environment.name=mcp:{target} cannot be reached: {_root(error)}") from error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def tools(self) -> list[dict[str, Any]]:
        """The schemas of all tools."""
        return self._wait(self._list())

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that a tool answers."""
        schema = next((t for t in _TOOLS.get(self._target, ()) if t["function"]["name"] == name), None)
        if schema is not None and set(arguments) == {"input"}:  # from a format that has one text per call
            known = list(schema["function"]["parameters"].get("properties", {}))
            arguments = arguments if "input" in known or not known else {known[0]: arguments["input"]}
        try:
            result = self._wait(self._client.result().call_tool(name, arguments))
        except Exception as error:
            if getattr(error, "code", None) != _CONNECTION_CLOSED:
                raise
            self.close()
            raise ServerEnded("the MCP server ended during the call") from error
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the connection, and a stdio server with it."""
        if self._closing is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:  # also a deadline of the caller
            running.cancel()
            raise

    async def _list(self) -> list[dict[str, Any]]:
        found, cursor = [], None
        while True:
            page = await self._client.result().list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema},
            }
            for t in found
        ]

    async def _serve(self) -> None:
        """Keep the connection open until `close`."""
        self._closing = asyncio.Event()
        try:
            async with self._connect() as client:
                self._client.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if not self._client.done():
                self._client.set_exception(error)

    def _connect(self) -> Any:
        try:
            from mcp import Client, StdioServerParameters, stdio_client
        except ImportError as error:
            raise EnvironmentProblem("the package mcp is needed: pip install 'gspo[mcp]'") from error
        if self._target.startswith(("http://", "https://")):
            return Client(self._target)
        command, *arguments = shlex.split(self._target)
        environment = {**os.environ, **(self._env or {})}
        return Client(stdio_client(StdioServerParameters(command=command, args=arguments, env=environment)))


def _root(error: BaseException) -> BaseException:
    """The first cause inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
