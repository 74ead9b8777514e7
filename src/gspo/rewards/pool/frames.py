"""Messages on a socket, each after its length. The trainer sends pickles to its workers; they send JSON back."""

from __future__ import annotations

import contextlib
import socket
import struct

_HEADER = struct.Struct("!I")
MAX_FRAME = 64 << 20


def send(sock: socket.socket, data: bytes) -> None:
    """Send one message; returns when all of it is written."""
    sock.sendall(pack(data))


def receive(sock: socket.socket) -> bytes:
    """Wait for one message; EOFError when the other side is gone."""
    (size,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    return _exactly(sock, size)


def pack(data: bytes) -> bytes:
    """The bytes to send for a message."""
    return _HEADER.pack(len(data)) + data


class Channel:
    """A socket on which whole messages are sent and received without waiting for the other side."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.outgoing = b""
        self._incoming = bytearray()

    @property
    def has_more(self) -> bool:
        """Whether the last read got bytes beyond its message."""
        return bool(self._incoming)

    def write(self) -> None:
        """Send as much of `outgoing` as the socket accepts now; OSError when the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            self.outgoing = self.outgoing[self.sock.send(self.outgoing) :]

    def read(self) -> bytes | None:
        """The next message if all of it is here. EOFError when the other side is gone, ValueError when it is too long."""
        try:
            part = self.sock.recv(1 << 20)
        except BlockingIOError:
            return None
        if not part:
            raise EOFError
        self._incoming += part
        if len(self._incoming) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._incoming)
        if size > MAX_FRAME:
            raise ValueError(f"a message of {size} bytes was announced, expected at most {MAX_FRAME}")
        end = _HEADER.size + size
        if len(self._incoming) < end:
            return None
        data = bytes(self._incoming[_HEADER.size : end])
        del self._incoming[:end]
        return data


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
