"""Verdicts on disk: a question that was answered once is never asked again, also not by a resumed run.

One SQLite file with every reply, by a hash of model, messages and sampling. A failure is kept under the group that it
belongs to, so that a run killed at any moment repeats it; one that ends in order forgets its failures, since the next
start may find the judge in better health. Several runs may share a file: they share its replies, but not their failures
and not the tokens that they have spent.
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
CREATE TABLE IF NOT EXISTS spent (tokens INTEGER, run TEXT DEFAULT '');
"""
_USED = (
    "SELECT key, model, reply, tokens, seconds FROM verdicts LIMIT 1",
    "SELECT key, place, text FROM failures LIMIT 1",
)
_REMEDIES = {
    "locked": "another program uses it; end that one, or name another file",
    "readonly": "make the file and its folder writable, or name another file",
    "unable to open": "make the file and its folder writable, or name another file",
    "full": "make room on the disk",
    "I/O": "look at the disk, or name a file on another one",
}
_DAMAGED = "it is damaged, or no file of verdicts; move it away, and all verdicts are asked for again"


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
    """Replies by question. `path` None keeps them in memory. `run` tells runs that share a file. Any thread may call it."""

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        self._lock, self._run_name = threading.Lock(), run
        self._name = ":memory:" if path is None else str(path)
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._name, check_same_thread=False, isolation_level=None, timeout=60)
            self._prepare()
        except sqlite3.Error as error:
            raise RewardError(
                f"reward.judge.cache={self._name!r} cannot be opened: {error}; {_remedy(error)}"
            ) from error
        except OSError as error:
            raise RewardError(
                f"reward.judge.cache={self._name!r} cannot be made: {error}; name another file"
            ) from error

    def _prepare(self) -> None:
        """Make the tables, and see that those of an older file can be used."""
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_TABLES)
        if "run" not in {row[1] for row in self._db.execute("PRAGMA table_info(spent)")}:
            with contextlib.suppress(sqlite3.OperationalError):  # another program has just added it
                self._db.execute("ALTER TABLE spent ADD COLUMN run TEXT DEFAULT ''")
        for statement in _USED:
            self._db.execute(statement).fetchone()

    def find(self, key: str) -> Reply | None:
        """The reply to a question, if it was asked before."""
        row = self._execute("SELECT reply, tokens, seconds FROM verdicts WHERE key = ?", key)
        if row is None or not isinstance(row[0], str):
            return None
        text, tokens, seconds = row
        return Reply(text, tokens if isinstance(tokens, int) else 0, seconds if isinstance(seconds, float) else 0.0)

    def add(self, key: str, model: str, reply: Reply, *, replace: bool = False) -> None:
        """Keep a reply. One that another program added first stays, unless it is to be replaced."""
        values = (key, model, reply.text, reply.tokens, reply.seconds)
        kept = "REPLACE" if replace else "IGNORE"
        columns = "(key, model, reply, tokens, seconds) VALUES (?, ?, ?, ?, ?)"
        self._execute(f"INSERT OR {kept} INTO verdicts {columns}", *values)

    def find_failure(self, key: str, place: str) -> str | None:
        """The failure of a question of this group, if the run was killed after it."""
        place = f"{self._run_name}{place}"
        row = self._execute("SELECT text FROM failures WHERE key = ? AND place = ?", key, place)
        return None if row is None else str(row[0])

    def add_failure(self, key: str, place: str, text: str) -> None:
        self._execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", key, f"{self._run_name}{place}", text)

    def spend(self, tokens: int) -> None:
        """Count the tokens of a call, whatever became of it."""
        self._execute("INSERT INTO spent (tokens, run) VALUES (?, ?)", tokens, self._run_name)

    def spent(self) -> int:
        """The tokens of all calls of the run, those of earlier sessions included."""
        row = self._execute("SELECT COALESCE(SUM(tokens), 0) FROM spent WHERE run = ?", self._run_name)
        return int(row[0])

    def close(self, scope: str = "") -> None:
        """Forget the run's failures whose place begins with `scope`: this session ends in order. On a full disk they stay."""
        begin = f"{self._run_name}{scope}"
        with contextlib.suppress(OSError):
            self._execute("PRAGMA busy_timeout = 1000")  # whom it waited for in vain, it does not wait for again
            self._execute("DELETE FROM failures WHERE substr(place, 1, ?) = ?", len(begin), begin)
        with self._lock:
            self._db.close()

    def _execute(self, statement: str, *values: Any) -> Any:
        """The first row of the result, None without one."""
        with self._lock:
            try:
                return self._db.execute(statement, values).fetchone()
            except sqlite3.DatabaseError as error:  # such as a full disk
                text = f"the verdicts of the judge cannot be kept: {error}; {_remedy(error)}"
                raise OSError(errno.EIO, text, self._name) from error


def _remedy(error: sqlite3.Error) -> str:
    return next((remedy for text, remedy in _REMEDIES.items() if text in str(error)), _DAMAGED)
