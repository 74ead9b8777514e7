"""The calls of rank 0 and of the ranks that follow it, and what each makes of an error. Collectives are replaced."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from gspo.distributed import torchrun_ranks
from gspo.distributed.rank_group import RankFailed, RankPlace
from gspo.distributed.rank_worker import RankWorker
from gspo.distributed.torchrun_ranks import END, REMEDY, TorchrunRanks, launched_rank_group
from gspo.exit_codes import EXIT_WORKERS_LOST

GLOO = RuntimeError("[gloo] Connection closed by peer")


class Watch:
    """A watch that knows `cause` once it is asked for it."""

    def __init__(self, place: RankPlace) -> None:
        self.cause: str | None = None
        self.later: str | None = None
        self.failures: list[str] = []
        self.is_stopped = False

    def find_cause(self, seconds: float) -> str | None:
        return self.cause or self.later

    def fail(self, message: str) -> None:
        self.failures.append(message)

    def stop(self) -> None:
        self.is_stopped = True


class Worker(RankWorker):
    """Notes its calls; `error` is raised by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.error: BaseException | None = None
        self.has_left = False

    def join(self, place: RankPlace) -> None: ...

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((method, args))
        if self.error is not None:
            raise self.error
        return f"own {method}"

    def leave(self) -> None:
        self.has_left = True


class World:
    """The collectives: what rank 0 sent, what followers receive, and what they gave."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox: list[Any] = []
        self.given: list[Any] = []
        self.error: BaseException | None = None

    def broadcast(self, objects: list[Any], *, src: int, group: Any) -> None:
        assert src == 0 and group == "control"
        if objects == [None]:
            item = self.inbox.pop(0)
            if isinstance(item, BaseException):
                raise item
            objects[0] = item
            return
        if self.error is not None:
            raise self.error
        self.sent += objects

    def gather(self, own: Any, results: list[Any] | None, *, dst: int, group: Any) -> None:
        assert dst == 0 and group == "control"
        if results is None:
            self.given.append(own)
        else:
            results[:] = [own, *(f"rank {rank}" for rank in range(1, len(results)))]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(torchrun_ranks, "RankWatch", Watch)
    monkeypatch.setattr(torchrun_ranks, "RankWorker", Worker)
    monkeypatch.setattr(torchrun_ranks, "StackAnswers", lambda *place: Watch(*place[2:]))
    monkeypatch.setattr(dist, "new_group", lambda **options: "control")
    monkeypatch.setattr(dist, "broadcast_object_list", world.broadcast)
    monkeypatch.setattr(dist, "gather_object", world.gather)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    yield world
    TorchrunRanks._joined = None


def ranks(rank: int = 0, world_size: int = 3) -> Any:
    return TorchrunRanks(RankPlace(rank, world_size, rank, "127.0.0.1", 1, "cpu"))


def test_a_call_is_sent_run_here_and_answered_by_all(world: World) -> None:
    group = ranks()
    assert group.call(RankWorker.scale_lr, 0.5) == ["own scale_lr", "rank 1", "rank 2"]
    assert world.sent == [("scale_lr", (0.5,))] and group._worker.calls == [("scale_lr", (0.5,))]
    group.close()
    assert world.sent[1:] == [("unload", ())]


def test_nothing_is_sent_once_the_cause_of_a_loss_is_known(world: World) -> None:
    group = ranks()
    group._watch.cause = "trainer rank 2 is gone"
    with pytest.raises(RankFailed, match=f"^trainer rank 2 is gone; {REMEDY}$"):
        group.call(RankWorker.unload)
    assert world.sent == [] and group._watch.failures == []
    with pytest.raises(RankFailed, match="unload: the trainer's ranks have ended"):
        group.call(RankWorker.unload)
    group.close()
    assert world.sent == []


def test_an_error_of_rank_0_is_its_own_and_the_others_are_told(world: World) -> None:
    group = ranks()
    group._worker.error = ValueError("no such model")
    with pytest.raises(ValueError, match="no such model"):
        group.call(RankWorker.unload)
    assert group.failed and group._watch.failures == ["ValueError: no such model"]


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("trainer rank 1: KeyError: 'x'", f"^trainer rank 1: KeyError: 'x'; {REMEDY}$"),
        (None, "^a trainer rank cannot be reached: RuntimeError: "),
    ],
)
def test_an_error_of_the_network_is_the_cause_that_another_rank_reports(world: World, cause: Any, message: str) -> None:
    group = ranks()
    group._watch.later, world.error = cause, GLOO
    with pytest.raises(RankFailed, match=message):
        group.call(RankWorker.unload)
    assert group.failed and group._watch.failures == []


def test_a_group_of_one_sends_nothing_and_goes_on_after_an_error(world: World) -> None:
    group = ranks(world_size=1)
    group._worker.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        group.call(RankWorker.unload)
    group._worker.error = None
    assert group.call(RankWorker.unload) == ["own unload"] and world.sent == [] and group.stacks() == ""
    group.dismiss()
    assert world.sent == [] and group._worker.has_left


def test_a_follower_runs_what_it_receives_and_leaves_at_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = []
    monkeypatch.setattr(signal, "signal", lambda number, action: ignored.append((number, action)))
    group = ranks(rank=1)
    world.inbox = [("scale_lr", (0.5,)), ("unload", ()), (END, ())]
    assert group.follow() == 0
    assert group._worker.calls == [("scale_lr", (0.5,)), ("unload", ())]
    assert world.given == ["own scale_lr", "own unload"]
    assert group._worker.has_left and group._watch.is_stopped and group._answers.is_stopped
    assert ignored == [(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_a_follower_reports_an_error_of_its_own(world: World, capsys: Any) -> None:
    group = ranks(rank=2)
    world.inbox, group._worker.error = [("unload", ())], KeyError("x")
    group._watch.later = "trainer rank 0: it failed"  # which is no reason to be silent about an error of its own
    assert group.follow() == EXIT_WORKERS_LOST
    said = capsys.readouterr().err
    assert said.startswith("trainer rank 2 failed:") and "KeyError: 'x'" in said
    assert group._watch.failures == ["KeyError: 'x'"] and group._watch.is_stopped and world.given == []


@pytest.mark.parametrize("cause", ["trainer rank 0: it failed", None])
def test_a_follower_whose_peers_are_gone_names_the_cause_or_reports_the_error(
    world: World, capsys: Any, cause: str | None
) -> None:
    group = ranks(rank=2)
    group._watch.later, world.inbox = cause, [GLOO]
    assert group.follow() == EXIT_WORKERS_LOST
    said = capsys.readouterr().err
    assert said.startswith("trainer rank 2 stops: trainer rank 0: it failed\n" if cause else "trainer rank 2 failed:")
    assert bool(group._watch.failures) == (cause is None) and group._watch.is_stopped


def test_followers_end_with_rank_0(world: World) -> None:
    TorchrunRanks._joined = group = ranks()
    group.dismiss(ValueError("of the loop, between two calls"))
    assert world.sent == [(END, ())] and group._watch.failures == []
    assert group._watch.is_stopped and group._worker.has_left and TorchrunRanks._joined is None


@pytest.mark.parametrize(
    ("error", "failures"), [(ValueError("no"), ["ValueError: no"]), (RankFailed("rank 1"), []), (None, [])]
)
def test_after_a_failed_call_followers_read_the_cause(world: World, error: Any, failures: list[str]) -> None:
    group = ranks()
    group.failed = True
    group.dismiss(error)
    assert world.sent == [] and group._watch.failures == failures
    assert group._watch.is_stopped and not group._worker.has_left, "the others may hang in a collective"


def test_a_follower_that_has_ended_already_is_no_error_at_the_end(world: World) -> None:
    group = ranks()
    world.error = GLOO
    group.dismiss()
    assert group._watch.is_stopped


def test_a_launch_has_one_group_which_ends_with_the_work_of_rank_0(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RankPlace(0, 2, 0, "127.0.0.1", 1, "cpu")
    monkeypatch.setattr(torchrun_ranks, "launched_place", lambda device: place)
    with launched_rank_group():
        pass
    with launched_rank_group():
        group = TorchrunRanks.join("auto")
        assert TorchrunRanks.join("auto") is group
    assert world.sent == [(END, ())]
    with pytest.raises(ValueError, match="no data"), launched_rank_group():
        second = TorchrunRanks.join("auto")
        assert second is not group
        raise ValueError("no data")
    assert world.sent == [(END, ())] * 2
