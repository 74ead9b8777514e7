"""One request on the event loop: its body, read within limits, and its updates, until it is over or the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from gspo.serving.backend import JobQueue
from gspo.serving.errors import ApiError
from gspo.serving.jobs import Job, Send
from gspo.serving.metrics import RequestTimes
from gspo.serving.replies import Update
from gspo.serving.wire.answer import Answer

BODY_SECONDS = 30.0  # for a client to send its body
MAX_DISCARDED = 64 << 20  # bytes of a body over the limit that are read, so that the client gets to read the answer


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > MAX_DISCARDED:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes, which is the limit", code="body_too_large")
    return b"".join(parts)


class Exchange:
    """The jobs of a request and the updates that they send to the event loop; leaving it cancels what is unfinished."""

    def __init__(self, queue: JobQueue, answer: Answer) -> None:
        self._queue, self._answer = queue, answer
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, list[Update]] | BaseException] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._num_left = len(answer.choices)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_left:
            for job in self._jobs:
                self._queue.cancel(job)

    def opened(self) -> Exchange:
        """The exchange with every prompt of the request queued; nothing is, when one is refused."""
        ask = self._answer.ask
        try:
            for number, prompted in enumerate(self._answer.prompts):
                self._jobs.append(self._queue.open(prompted, ask, self._sender(number * ask.n), self._answer.id))
        except ApiError:
            self.__exit__()
            raise
        return self

    def _sender(self, first_choice: int) -> Send:
        def send(found: list[Update] | ApiError) -> None:
            item = found if isinstance(found, ApiError) else (first_choice, found)
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)

        return send

    async def updates(self, receive: Any) -> AsyncIterator[list[Update]]:
        """What arrives, added to the answer's choices; ClientGone when the client leaves."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            while self._num_left:
                item = await self._arrived.get()
                if isinstance(item, BaseException):
                    raise item
                first, found = item
                numbered = [dataclasses.replace(update, index=first + update.index) for update in found]
                for update in numbered:
                    self._answer.choices[update.index].add(update)
                    self._num_left -= update.reason is not None
                yield numbered
        finally:
            watch.cancel()

    async def _watch(self, receive: Any) -> None:
        """Wait until the client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._arrived.put_nowait(ClientGone())


class EventStream:
    """A streamed answer, as an ASGI response: server-sent events, the last one `[DONE]`."""

    def __init__(self, exchange: Exchange, answer: Answer, times: RequestTimes) -> None:
        self._exchange, self._answer, self._times = exchange, answer, times

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        with self._exchange:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._write(send, self._answer.opening())
                async for found in self._exchange.updates(receive):
                    self._times.first_token()
                    await self._write(send, [chunk for update in found for chunk in self._answer.chunks(update)])
                await self._write(send, self._answer.closing())
                self._times.end()
            except ApiError as error:
                await self._write(send, [error.body])
            except ClientGone:
                return
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _write(self, send: Any, chunks: list[dict[str, Any]]) -> None:
        """Send events; waits while the client reads more slowly than they come."""
        if chunks:
            body = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
            await send({"type": "http.response.body", "body": body, "more_body": True})
