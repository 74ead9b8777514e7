"""Runs the functions of agents: coroutines on one event loop, plain functions in a thread each."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gspo.serving.agents.loading import arguments_of, wants


class AgentRunner:
    """Starts agents; `close` ends the event loop and what runs on it. A thread that hangs is left behind."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        self._http: Any = None

    def start(self, data: Any, base_url: str, api_key: str, done: Callable[[Future[Any]], None]) -> Future[Any]:
        """Run the agent on a row; `done` gets its result, in any thread."""
        offered = {"base_url": base_url, "api_key": api_key}
        if inspect.iscoroutinefunction(self._function):
            future = asyncio.run_coroutine_threadsafe(self._run(data, offered), self._loop)
        else:
            future = Future()
            threading.Thread(target=self._run_plain, args=(data, offered, future), name="agent", daemon=True).start()
        future.add_done_callback(done)
        return future

    async def _run(self, data: Any, offered: dict[str, Any]) -> Any:
        if wants(self._function, "http_client"):
            self._http = self._http or _new_http_client()
            offered = {**offered, "http_client": self._http}
        positional, named = arguments_of(self._function, data, offered)
        return await self._function(*positional, **named)

    def _run_plain(self, data: Any, offered: dict[str, Any], future: Future[Any]) -> None:
        try:
            positional, named = arguments_of(self._function, data, {**offered, "http_client": None})
            result = self._function(*positional, **named)
        except BaseException as error:
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    def close(self) -> None:
        """End everything. May be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()


def _new_http_client() -> Any:
    """The client that the openai package would make, so that agents of a process share its connections."""
    try:
        from openai import DefaultAsyncHttpxClient
    except ImportError:
        return None
    return DefaultAsyncHttpxClient(timeout=None)
