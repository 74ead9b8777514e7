"""Length-prefixed frames on a socket: pickles from the trusted parent to a worker, JSON back."""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct("!I")
MAX_FRAME = 64 << 20


def frame(data: bytes) -> bytes:
    """The bytes to send for a message."""
    return _HEADER.pack(len(data)) + data


def send(sock: socket.socket, data: bytes) -> None:
    """Send one message, waiting until it is written."""
    sock.sendall(frame(data))


def receive(sock: socket.socket) -> bytes:
    """Wait for one message; EOFError when the other side is gone."""
    (size,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    return _exactly(sock, size)


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove and return the first whole message of a buffer, or None; ValueError when one is announced too large."""
    if len(buffer) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(buffer)
    if size > MAX_FRAME:
        raise ValueError(f"a message of {size} bytes was announced, at most {MAX_FRAME} are taken")
    if len(buffer) < _HEADER.size + size:
        return None
    data = bytes(buffer[_HEADER.size : _HEADER.size + size])
    del buffer[: _HEADER.size + size]
    return data


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
