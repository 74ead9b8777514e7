"""The messages between judge and fork server: fixed records, as parsing text would copy memory after every fork."""

from __future__ import annotations

import struct
from typing import NamedTuple

READY, RUN, KILL, ENDED, FAILED = range(5)
MAX_BYTES = 4096

# The request (RUN or KILL), the child's number, bytes of memory, seconds of processor time.
REQUEST = struct.Struct("=BQQQ")
# What happened, the child's number, its wait status, whether it was confined, its seconds.
MESSAGE = struct.Struct("=BQi?d")


class ServerMessage(NamedTuple):
    """A message of the server; `reason` is a text when `what` is FAILED."""

    what: int
    number: int
    status: int
    confined: bool
    wall: float
    reason: str


def read_message(data: bytes) -> ServerMessage:
    """The message in the bytes that the server sent."""
    what, number, status, confined, wall = MESSAGE.unpack_from(data)
    return ServerMessage(what, number, status, confined, wall, data[MESSAGE.size :].decode(errors="replace"))
