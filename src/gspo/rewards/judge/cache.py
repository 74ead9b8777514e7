"""Verdicts on disk: a question that was answered once is never asked again, also not by a resumed run.

One SQLite file with every reply, by a hash of model, messages and sampling. A failure is kept under the group that it
belongs to, so that a run killed at any moment repeats it; one that ends in order forgets its failures, since the next
start may find the judge in better health.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.rewards.protocol import RewardError

_TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, model TEXT, reply TEXT, tokens INTEGER, seconds REAL, at TEXT DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS failures (key TEXT, place TEXT, text TEXT, PRIMARY KEY (key, place));
CREATE TABLE IF NOT EXISTS spent (tokens INTEGER);
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge answered: the text, the tokens of question and answer, and the seconds that it took."""

    text: str
    tokens: int
    seconds: float


def question_key(model: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> str:
    """The name of a question in the cache."""
    content = json.dumps([model, list(messages), dict(sampling)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


class VerdictCache:
    """Replies by question. `path` None keeps them in memory. Any thread may call it."""

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._name = name = ":memory:" if path is None else str(path)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(name, check_same_thread=False, isolation_level=None, timeout=60)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
        except sqlite3.Error as error:
            raise RewardError(f"reward.judge.cache={name!r} cannot be opened: {error}; remove the file") from error

    def find(self, key: str) -> Reply | None:
        """The reply to a question, if it was asked before."""
        row = self._run("SELECT reply, tokens, seconds FROM verdicts WHERE key = ?", key).fetchone()
        return None if row is None else Reply(*row)

    def add(self, key: str, model: str, reply: Reply) -> None:
        values = (key, model, reply.text, reply.tokens, reply.seconds)
        self._run("INSERT OR IGNORE INTO verdicts (key, model, reply, tokens, seconds) VALUES (?, ?, ?, ?, ?)", *values)

    def find_failure(self, key: str, place: str) -> str | None:
        """The failure of a question of this group, if the run was killed after it."""
        row = self._run("SELECT text FROM failures WHERE key = ? AND place = ?", key, place).fetchone()
        return None if row is None else row[0]

    def add_failure(self, key: str, place: str, text: str) -> None:
        self._run("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", key, place, text)

    def spend(self, tokens: int) -> None:
        """Count the tokens of a call, whatever became of it."""
        self._run("INSERT INTO spent VALUES (?)", tokens)

    def spent(self) -> int:
        """The tokens of all calls, those of earlier sessions included."""
        return int(self._run("SELECT COALESCE(SUM(tokens), 0) FROM spent").fetchone()[0])

    def close(self) -> None:
        """Forget the failures: this session ends in order. On a full disk they stay."""
        with contextlib.suppress(OSError):
            self._run("DELETE FROM failures")
        with self._lock:
            self._db.close()

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        with self._lock:
            try:
                return self._db.execute(statement, values)
            except sqlite3.OperationalError as error:  # such as a full disk
                raise OSError(errno.EIO, f"the verdicts of the judge cannot be kept: {error}", self._name) from error
