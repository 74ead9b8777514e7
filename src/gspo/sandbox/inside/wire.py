"""The messages between judge and fork-server: fixed records, as parsing text would touch memory after every fork."""

from __future__ import annotations

import struct
from typing import NamedTuple

HELLO, RUN, KILL, ENDED, FAILED = range(5)
MAX_BYTES = 4096

# What is asked (RUN or KILL), the child's number, bytes of memory, seconds of processor time.
REQUEST = struct.Struct("=BQQQ")
# What happened, the child's number, its wait status (of HELLO: namespaces), whether it was confined, its seconds.
NEWS = struct.Struct("=BQi?d")


class News(NamedTuple):
    """What the server said; `reason` in words where it FAILED."""

    what: int
    number: int
    status: int
    confined: bool
    wall: float
    reason: str


def read_news(data: bytes) -> News:
    """A message of the server."""
    what, number, status, confined, wall = NEWS.unpack_from(data)
    return News(what, number, status, confined, wall, data[NEWS.size :].decode(errors="replace"))
