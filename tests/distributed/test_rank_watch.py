"""What a rank learns of the others through their store: failures, ends as planned, silence, and stacks. No ranks are started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gspo.distributed import rank_stacks, rank_watch
from gspo.distributed.rank_group import RankPlace
from gspo.distributed.rank_stacks import StackAnswers, ask_stacks, store_key, thread_stacks
from gspo.distributed.rank_watch import RankWatch, describe, is_network_error
from gspo.exit_codes import EXIT_WORKERS_LOST

HERE = socket.gethostname()


class Store:
    """A store in this process; `gone` makes every call fail as torch's does without its server."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.gone = False

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._reach()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        self._reach()
        self.values[key] = str(int(self.values.get(key, 0)) + number)
        return int(self.values[key])

    def _reach(self) -> None:
        if self.gone:
            raise RuntimeError("Broken pipe")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    for module in (rank_watch, rank_stacks):
        monkeypatch.setattr(module, "connect_store", lambda *place: store)
    monkeypatch.setattr(rank_watch, "BEAT_SECONDS", 0.005)
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", 60.0)
    return store


@pytest.fixture
def watch(store: Store) -> Iterator[RankWatch]:
    watch = RankWatch(RankPlace(1, 4, 1, "127.0.0.1", 1, "cpu"))
    yield watch
    watch.stop()


def join(store: Store, rank: int, host: str = HERE, pid: int | None = None) -> None:
    store.set(store_key("where", rank), json.dumps([host, os.getpid() if pid is None else pid]))


def beats(store: Store, num: int, rank: int = 1) -> None:
    """Wait until the watch of a rank has looked at the others `num` times more."""
    key = store_key("beat", rank)
    end, first = time.monotonic() + 20, int(store.values.get(key, 0))
    while int(store.values.get(key, 0)) < first + num:
        assert time.monotonic() < end, "the watch has ended"
        time.sleep(0.002)


def gone_process() -> int:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_ranks_that_have_not_joined_and_ranks_that_are_well_are_no_problem(store: Store, watch: RankWatch) -> None:
    assert json.loads(store.get(store_key("where", 1))) == [HERE, os.getpid()]
    join(store, 0)
    join(store, 2, "elsewhere", 1)
    beats(store, 3)
    assert watch.cause is None and watch.find_cause(0.0) is None


def test_a_failure_that_a_rank_reports_comes_before_one_that_disappeared(store: Store, watch: RankWatch) -> None:
    with watch._lock:  # both at once
        join(store, 0, pid=gone_process())
        store.set(store_key("failure", 3), "ValueError: no")
    assert watch.find_cause(10.0) == "trainer rank 3: ValueError: no"


def test_a_process_that_is_gone_is_named_unless_it_left_as_planned(store: Store, watch: RankWatch) -> None:
    pid = gone_process()
    store.set(store_key("left", 0), "1")
    join(store, 0, pid=pid)
    beats(store, 3)
    assert watch.cause is None
    join(store, 2, pid=pid)
    assert watch.find_cause(10.0) == f"trainer rank 2 (process {pid}) is gone: it was killed or crashed"


def test_a_rank_elsewhere_is_gone_when_its_beats_stop(
    store: Store, watch: RankWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(rank_watch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    join(store, 2, "elsewhere", gone_process())  # its number means nothing on this machine
    join(store, 0, HERE)
    beats(store, 3)
    now[0] += rank_watch.SILENT_SECONDS
    beats(store, 3)
    assert watch.cause is None, "not yet"
    store.set(store_key("beat", 2), "1")
    beats(store, 3)
    now[0] += rank_watch.SILENT_SECONDS
    beats(store, 3)
    assert watch.cause is None, "from its last beat on; a rank of this machine may be silent"
    now[0] += 0.5
    assert watch.find_cause(float("inf")) == "trainer rank 2 has given no sign of life for 40 s: its machine is gone"


def test_a_store_without_its_server_means_that_the_launcher_is_gone(store: Store, watch: RankWatch) -> None:
    store.gone = True
    assert "the launcher (torchrun)" in (watch.find_cause(10.0) or "")
    watch.fail("nobody reads it")
    watch.stop()


def test_a_rank_writes_its_failure_and_that_it_leaves_once(store: Store, watch: RankWatch) -> None:
    watch.fail("KeyError: 'x'")
    beats(store, 3)
    assert watch.cause is None, "its own end is no cause for it"
    watch.stop()
    assert store.get(store_key("failure", 1)) == b"KeyError: 'x'" and store.get(store_key("left", 1)) == b"1"
    del store.values[store_key("left", 1)]
    watch.stop()
    assert store_key("left", 1) not in store.values
    assert watch.find_cause(60.0) is None, "nobody looks any more"


def test_a_process_whose_main_thread_does_not_return_is_ended(
    store: Store, watch: RankWatch, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", ended.append)
    store.set(store_key("failure", 0), "ValueError: no")
    watch._thread.join(10.0)
    assert ended == [EXIT_WORKERS_LOST]
    assert "error: trainer rank 0: ValueError: no; this rank does not end by itself" in capsys.readouterr().err


def test_a_process_whose_main_thread_returns_is_not_ended(
    store: Store, watch: RankWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended"))
    store.set(store_key("failure", 0), "ValueError: no")
    assert watch.find_cause(10.0) is not None
    watch.stop()
    watch._thread.join(10.0)
    assert not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (dist.DistStoreError("anything"), True),
        (RuntimeError("[../gloo/transport] Connection reset by PEER"), True),
        (RuntimeError("NCCL error"), True),
        (RuntimeError("Timed out after 30 s"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("connection"), False),
    ],
)
def test_which_errors_only_follow_from_another_rank(error: BaseException, is_one: bool) -> None:
    assert is_network_error(error) == is_one


def test_errors_in_one_line() -> None:
    assert describe(KeyError("a")) == "KeyError: 'a'" and describe(RuntimeError("  ")) == "RuntimeError"


def test_keys_of_a_restarted_launch_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    first = store_key("beat", 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first == "gspo/0/beat/1" and store_key("beat", 1) == "gspo/1/beat/1"


def test_ranks_answer_every_question_with_their_stacks_and_silent_ones_are_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_stacks, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(rank_stacks, "ANSWER_SECONDS", 0.1)
    answers = StackAnswers("127.0.0.1", 1, rank=2)
    for _ in range(2):
        found = ask_stacks("127.0.0.1", 1, [2])
        assert found.startswith("trainer rank 2:\nthread ") and "_run" in found and "gave no answer" not in found
    both = ask_stacks("127.0.0.1", 1, [1, 2])
    assert both.startswith("trainer rank 1:\ngave no answer\ntrainer rank 2:\nthread ")
    answers.stop()
    assert not answers._thread.is_alive()
    store.gone = True
    assert ask_stacks("127.0.0.1", 1, [1]) == "trainer rank 1:\nthe ranks' store cannot be reached: Broken pipe"


def test_the_stacks_of_a_process_name_its_threads() -> None:
    wait = threading.Event()
    thread = threading.Thread(target=wait.wait, name="waiting-one")
    thread.start()
    found = thread_stacks()
    wait.set()
    thread.join()
    assert f"thread waiting-one of process {os.getpid()}:" in found
    assert "test_the_stacks_of_a_process_name_its_threads" in found
