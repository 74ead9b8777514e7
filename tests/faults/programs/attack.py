"""A hostile program, the world that it attacks, and the outcome."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a hostile program came to, from either grader."""

    earned: bool
    stdout: bytes = b""
    overran: bool = False  # its deadline did not stop it
    broke_grader: bool = False  # the grader ended without a verdict


@dataclass(frozen=True, slots=True)
class Attack:
    """One named hostile program. `gained` tells whether it reached its goal, besides a reward."""

    name: str
    kind: Literal["verdict", "host", "resources"]
    source: str
    gained: Callable[[World, Outcome], bool] = field(default=lambda world, outcome: False)

    def succeeded(self, world: World, outcome: Outcome) -> bool:
        return outcome.earned or self.gained(world, outcome)


@dataclass(slots=True)
class World:
    """Bounded targets that a hostile program may try to harm: a folder, a process, a port, secrets."""

    folder: Path
    token: str
    victim: subprocess.Popen[bytes]
    listener: socket.socket
    contacts: int = 0

    @property
    def done(self) -> str:
        """What a program prints once it did what must not be possible; not in its text, so an echo proves nothing."""
        return f"done-{self.token}"

    @property
    def expected(self) -> str:
        """An answer that cannot be guessed."""
        return f"answer-{self.token}"

    @property
    def mark(self) -> str:
        """The name under which left-over processes are found (the kernel keeps 15 characters)."""
        return f"gm{self.token[:10]}"

    @property
    def tests(self) -> dict[str, Any]:
        return {"fn_name": "answer", "inputs": [[1], [2]], "outputs": [self.expected + "-1", self.expected + "-2"]}

    def fill(self, source: str) -> str:
        """The program's text with the targets put in."""
        values = {
            "@FOLDER@": str(self.folder),
            "@VICTIM@": str(self.victim.pid),
            "@JUDGE@": str(os.getpid()),
            "@PORT@": str(self.listener.getsockname()[1]),
            "@TOKEN@": self.token,
            "@MARK@": self.mark,
        }
        for key, value in values.items():
            source = source.replace(key, value)
        return source

    def reset(self) -> None:
        """Put the folder back as it was."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in ("witness", "secret"):
            (self.folder / name).write_text(self.token)
            (self.folder / name).chmod(0o666)
        self.contacts = 0
        if self.victim_harmed():
            self.victim.kill()
            self.victim.wait()
            self.victim = _start_victim()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/gspo-{self.token}")

    def touched(self) -> bool:
        """Whether a file of the folder was changed, added or removed."""
        names = {path.name for path in self.folder.iterdir()} - {"tests.json", "program.py", "result.json"}
        if names != {"witness", "secret"} or os.path.exists(f"/dev/shm/gspo-{self.token}"):
            return True
        return any((self.folder / name).read_text() != self.token for name in names)

    def contacted(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()[0].close()
            self.contacts += 1
        return self.contacts > 0

    def victim_harmed(self) -> bool:
        if self.victim.poll() is not None:
            return True
        return resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE)[0] == 7

    def left_over(self) -> list[int]:
        """Processes that carry the mark."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if Path("/proc", entry, "comm").read_text().strip() == self.mark and int(entry):
                    found.append(int(entry))
        return found

    def sweep(self) -> None:
        """End left-over processes."""
        for pid in self.left_over():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _start_victim() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])


@contextlib.contextmanager
def make_world() -> Iterator[World]:
    """A world in a temporary folder; its process, port and left-overs are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="gspo-world-") as folder, socket.socket() as listener:
        os.chmod(folder, 0o777)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        world = World(Path(folder), secrets.token_hex(8), _start_victim(), listener)
        os.environ["GSPO_SCORECARD_EXPECTED"] = world.expected
        try:
            world.reset()
            yield world
        finally:
            os.environ.pop("GSPO_SCORECARD_EXPECTED", None)
            world.sweep()
            world.reset()
            world.victim.kill()
            world.victim.wait()
