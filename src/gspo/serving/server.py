"""The web server: one listening socket, in the main thread of a program or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30.0  # for a client to send the head of a request
READ_SECONDS = 60.0  # for a client to read at least something of what waits for it
MAX_CONNECTIONS = 4096


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request does not arrive whole, or whose client does not read."""

    _timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` is called as soon as anything waits for the client
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits = self.conn.their_state is h11.IDLE
        if not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif waits and self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _start_read_timer(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(READ_SECONDS, self._abort_unread, waiting)

    def _abort_unread(self, waited: int) -> None:
        """Reset a connection of whose waiting bytes none was read; `close` would wait for the client."""
        if self.transport.get_write_buffer_size() >= waited:
            now = struct.pack("ii", 1, 0)  # without what the system has in its own buffer
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            self.transport.abort()
        else:
            self._start_read_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._close_waiting)

    def _close_waiting(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OSError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: Any, drain_seconds: float) -> uvicorn.Server:
    """A server of an application. After it is asked to stop it finishes open requests, within `drain_seconds`."""
    _raise_file_limit()
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        limit_concurrency=MAX_CONNECTIONS,
    )
    return uvicorn.Server(config)


def _raise_file_limit() -> None:
    """Let the process have a connection per client: the usual limit of open files is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def serving(app: Any, host: str = "127.0.0.1", port: int = 0, drain_seconds: float = 5.0) -> Iterator[str]:
    """Within this the application is served by a thread; gives its URL."""
    with listen(host, port) as listener:
        server = make_server(app, drain_seconds)
        thread = threading.Thread(target=_run, args=(server, listener), name="web server", daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    asyncio.run(server.serve(sockets=[listener]))
