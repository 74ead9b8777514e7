"""The first code of a fork server. No module that is imported after it can register code to run at a fork."""

from __future__ import annotations

import os


def main(descriptor: int, level: int, numpy_parent: str, with_numpy: bool) -> None:
    """Prepare the fork server and serve the judge on the open socket `descriptor` until it is closed.

    Modules such as `threading` and `random` register functions to be called after a fork, which renew locks and random
    state. The server has one thread, holds no lock and seeds each child itself, and every such call would copy memory
    in each child. What a program registers later is kept.
    """
    register = os.register_at_fork
    os.register_at_fork = _ignore  # type: ignore[assignment]
    try:
        from . import server

        prepared = server.prepare(descriptor, level, numpy_parent, with_numpy)
    finally:
        os.register_at_fork = register
    prepared.serve()


def _ignore(**hooks: object) -> None:
    pass
