"""The judge's ends of a child's pipes: output is read up to a limit, input written as fast as the child reads."""

from __future__ import annotations

import contextlib
import fcntl
import os

_CHUNK = 1 << 16


class PipeReader:
    """Reads a pipe without blocking and keeps the first `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.fd, self.child_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.limit = limit
        self.data = bytearray()
        self.truncated = False
        self.closed = False

    def read(self) -> bool:
        """Read one chunk; False when there is none now, or the pipe ended."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.closed = True
            return False
        room = self.limit - len(self.data)
        self.data += chunk[:room]
        self.truncated |= len(chunk) > room
        return True

    def drain(self) -> None:
        """Read all that is there now, without waiting for the end: another process may hold the pipe open."""
        while not self.closed and not self.truncated and self.read():
            pass

    def take_line(self) -> bytes | None:
        """The next whole line, removed from the data; None when there is none yet."""
        end = self.data.find(b"\n")
        if end < 0:
            return None
        line = bytes(self.data[: end + 1])
        del self.data[: end + 1]
        return line


class PipeWriter:
    """Writes to a pipe without blocking, and keeps what the pipe has no room for yet."""

    def __init__(self) -> None:
        self.child_fd, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.pending = bytearray()
        self.broken = False

    def write(self, data: bytes = b"") -> None:
        """Queue `data` and write as much as the pipe has room for; it is dropped when the reader is gone."""
        self.pending += data
        try:
            while self.pending:
                del self.pending[: os.write(self.fd, self.pending)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.broken = True
            self.pending.clear()


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_file(data: bytes) -> int:
    """A descriptor of an anonymous file that holds `data` and can no longer be changed."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def close_all(fds: list[int]) -> None:
    """Close descriptors, ignoring those that are closed already."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
