"""A WebSocket connection without threads: text messages, one at a time. For environments that a server plays."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque

from gspo.environments.protocol import EnvironmentProblem

CONNECT_TIMEOUT, CLOSE_TIMEOUT = 30.0, 1.0
_READ = 1 << 16


class WebSocket:
    """An open connection. `receive` waits for the next text; the caller's own deadline ends a silent server."""

    def __init__(self, url: str) -> None:
        try:
            from websockets.client import ClientProtocol
            from websockets.uri import parse_uri
        except ImportError as error:
            raise EnvironmentProblem("the package websockets is needed: pip install 'gspo[openenv]'") from error
        place = parse_uri(url)
        plain = socket.create_connection((place.host, place.port), timeout=CONNECT_TIMEOUT)
        context = ssl.create_default_context() if place.secure else None
        self._socket = context.wrap_socket(plain, server_hostname=place.host) if context else plain
        self._protocol = ClientProtocol(place, max_size=None)
        self._texts: deque[str] = deque()
        self._parts: list[bytes] = []  # of a message that has not ended
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        while self._protocol.state.name == "CONNECTING":
            self._read()
        if self._protocol.handshake_exc is not None:
            raise self._protocol.handshake_exc
        self._socket.settimeout(None)

    def send(self, text: str) -> None:
        """Send one message."""
        self._protocol.send_text(text.encode())
        self._flush()

    def receive(self) -> str:
        """Wait for the next message."""
        while not self._texts:
            self._read()
        return self._texts.popleft()

    def close(self) -> None:
        """Close the connection; the other side has a moment to do so, too."""
        with contextlib.suppress(OSError), self._socket:
            self._socket.settimeout(CLOSE_TIMEOUT)
            if self._protocol.state.name == "OPEN":
                self._protocol.send_close()
                self._flush()
            while True:
                self._read()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._socket.sendall(data)

    def _read(self) -> None:
        """Take in what has arrived; ConnectionError when the other side has closed."""
        from websockets.frames import Frame, Opcode

        data = self._socket.recv(_READ)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._protocol.receive_data(data)
        self._flush()
        for event in self._protocol.events_received():
            if not isinstance(event, Frame) or event.opcode not in (Opcode.TEXT, Opcode.CONT):
                continue
            self._parts.append(bytes(event.data))
            if event.fin:
                self._texts.append(b"".join(self._parts).decode())
                self._parts.clear()
