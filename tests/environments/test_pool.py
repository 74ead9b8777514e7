"""Which worker plays which job of an episode, one event at a time: the tests are the workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from gspo.environments import pool as episode_pool
from gspo.environments.host import Job
from gspo.environments.loading import EnvironmentSpec
from gspo.environments.pool import EpisodePool, open_pool
from gspo.environments.protocol import Action
from gspo.rewards.pool.worker_pool import JobFailed
from gspo.types import Prompt
from tests.rewards.test_worker_pool import LONG, HeldWorkers, Peer

PROMPT = Prompt("p", (), ())


class World:
    """A pool whose workers the test plays."""

    def __init__(self, num_workers: int = 2, **settings: Any) -> None:
        self.source = HeldWorkers()
        self.pool = EpisodePool(self.source, **{"num_workers": num_workers, "timeout": LONG, **settings})

    def play(self, key: str, num_actions: int = 0) -> Future[Any]:
        return self.pool.play(Job(key, PROMPT, 0, (Action("go"),) * num_actions))

    def next(self, peer: Peer) -> tuple[str, int]:
        """The next job of a worker: its episode, and how many actions, -1 to close it."""
        job = peer.job()
        return job.key, -1 if job.prompt is None else len(job.actions)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def new(**settings: Any) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield new
    for world in worlds:
        world.pool.close()


def begin(world: World, *keys: str) -> list[Peer]:
    """Begin an episode on each of as many workers."""
    futures = [world.play(key) for key in keys]
    peers = [world.source.peer() for _ in keys]
    found = {world.next(peer)[0]: peer for peer in peers}
    for key, future in zip(keys, futures):
        found[key].answer({"result": key})
        assert future.result(LONG) == key
    return [found[key] for key in keys]


def test_an_episode_stays_with_its_worker(make: Callable[..., World]) -> None:
    world = make()
    a, b = begin(world, "a", "b")
    for turn in (1, 2):
        futures = [world.play("b", turn), world.play("a", turn)]
        for key, peer, future in (("a", a, futures[1]), ("b", b, futures[0])):
            assert world.next(peer) == (key, turn)
            peer.answer({"result": turn})
            assert future.result(LONG) == turn


def test_a_job_waits_for_its_busy_worker_while_others_pass(make: Callable[..., World]) -> None:
    world = make()
    a, b = begin(world, "a", "b")
    world.play("a", 1)
    assert world.next(a) == ("a", 1)
    waiting, new = world.play("a", 2), world.play("c")
    assert world.next(b) == ("c", 0), "the job behind it finds an idle worker"
    b.answer({"result": "c"})
    assert new.result(LONG) == "c" and not waiting.done()
    a.answer({"result": 1})
    assert world.next(a) == ("a", 2)


def test_waiting_jobs_keep_their_order(make: Callable[..., World]) -> None:
    world = make(num_workers=1)
    (a,) = begin(world, "a")
    for turn in (1, 2, 3):
        world.play("a", turn)
    for turn in (1, 2, 3):
        assert world.next(a) == ("a", turn)
        a.answer({"result": turn})


def test_a_job_that_waited_for_its_worker_comes_before_later_ones(make: Callable[..., World]) -> None:
    world = make()
    a, b = begin(world, "a", "b")
    world.play("a", 1)
    first = world.play("b", 1)
    assert world.next(a) == ("a", 1) and world.next(b) == ("b", 1)
    for key, turn in (("a", 2), ("a", 3), ("c", 0), ("d", 0)):
        world.play(key, turn)
    b.answer({"result": 1})
    assert first.result(LONG) == 1 and world.next(b) == ("c", 0)
    for turn in (2, 3):
        a.answer({"result": 1})
        assert world.next(a) == ("a", turn), "before the last one, which any worker could play"
    a.answer({"result": 1})
    assert world.next(a) == ("d", 0)


def test_a_new_episode_goes_to_the_worker_that_has_the_fewest(make: Callable[..., World]) -> None:
    world = make()
    a, b = begin(world, "a", "b")
    busy = world.play("a", 1)
    assert world.next(a) == ("a", 1)
    for key in ("c", "d"):
        future = world.play(key)
        assert world.next(b) == (key, 0)
        b.answer({"result": 0})
        future.result(LONG)
    a.answer({"result": 0})
    busy.result(LONG)
    world.play("e")
    assert world.next(a) == ("e", 0), "it has one episode, the other three"


def test_an_episode_is_closed_where_it_is_and_one_that_is_nowhere_needs_no_worker(make: Callable[..., World]) -> None:
    world = make()
    a, b = begin(world, "a", "b")
    closed = world.pool.play(Job("a"))
    assert world.next(a) == ("a", -1)
    a.answer({"result": None})
    assert closed.result(LONG) is None
    world.pool.end("a")
    world.pool.end("unknown")
    nowhere = world.pool.play(Job("unknown"))
    with pytest.raises(CancelledError):
        nowhere.result(LONG)
    world.play("c")
    assert world.next(a) == ("c", 0), "it has none now, the other has one"
    world.pool.end("b")
    assert world.next(b) == ("b", -1)


def test_after_the_death_of_its_worker_an_episode_is_played_elsewhere(make: Callable[..., World]) -> None:
    world = make()
    a, b = begin(world, "a", "b")
    again = world.play("a", 1)
    assert world.next(a) == ("a", 1)
    a.die()
    assert world.next(b) == ("a", 1)
    b.answer({"result": 1})
    assert again.result(LONG) == 1
    world.play("a", 2)
    assert world.next(b) == ("a", 2), "its home from now on"


def test_a_busy_worker_that_is_stuck_gives_its_other_episodes_away(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_pool, "STUCK_SHARE", 1e-4)
    world = make(timeout=1000.0)
    a, b = begin(world, "a", "b")
    first = world.play("b", 1)
    assert world.next(b) == ("b", 1)
    c = world.play("c")
    assert world.next(a) == ("c", 0)
    b.answer({"result": "b"})
    assert first.result(LONG) == "b"
    moved = world.play("a", 1)
    assert world.next(b) == ("a", 1), "after a tenth of a second"
    b.answer({"result": "moved"})
    assert moved.result(LONG) == "moved"
    a.answer({"result": "c"})
    assert c.result(LONG) == "c"
    assert world.next(a) == ("a", -1), "its own is closed when it is idle"
    again = world.play("a", 2)
    assert world.next(b) == ("a", 2)
    b.answer({"result": 2})
    assert again.result(LONG) == 2
    a.answer({"result": None})
    d = world.play("c", 1)
    assert world.next(a) == ("c", 1), "nothing else is closed"
    a.answer({"result": 1})
    assert d.result(LONG) == 1


def test_a_worker_that_dies_while_it_closes_what_it_left_takes_nothing_along(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_pool, "STUCK_SHARE", 1e-4)
    world = make(timeout=1000.0)
    a, b = begin(world, "a", "b")
    first = world.play("b", 1)
    assert world.next(b) == ("b", 1)
    c = world.play("c")
    assert world.next(a) == ("c", 0)
    b.answer({"result": 1})
    first.result(LONG)
    moved = world.play("a", 1)
    assert world.next(b) == ("a", 1)
    b.answer({"result": 1})
    moved.result(LONG)
    a.answer({"result": "c"})
    assert c.result(LONG) == "c" and world.next(a) == ("a", -1)
    a.die()
    world.play("a", 2)
    assert world.next(b) == ("a", 2), "the episode stays where it is played"


def test_episodes_of_a_worker_past_its_deadline_are_played_elsewhere(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(num_workers=1)
    (a,) = begin(world, "a")
    monkeypatch.setattr(world.pool, "_timeout", 0.05)
    late = world.play("a", 1)
    assert world.next(a) == ("a", 1)
    with pytest.raises(JobFailed, match=r"no result within 0\.05 s"):
        late.result(LONG)
    monkeypatch.setattr(world.pool, "_timeout", LONG)
    again = world.play("a", 1)
    other = world.source.peer()
    assert world.next(other) == ("a", 1)
    other.answer({"result": 1})
    assert again.result(LONG) == 1


class Loud:
    """An environment of this process."""

    tools = ({"type": "function", "function": {"name": "shout"}},)
    tool_format = "tag"

    def reset(self, prompt: Prompt, seed: int) -> Any:
        return ("hello",)

    def step(self, action: Action) -> Any:
        raise ValueError("too loud")

    def close(self) -> None: ...


def test_an_environment_of_this_process_is_played_by_threads() -> None:
    pool = open_pool(
        EnvironmentSpec(made=Loud), num_workers=1, timeout=LONG, tool_timeout=1.0, memory=1, retries=0, max_chars=3
    )
    assert pool.tools == [{"type": "function", "function": {"name": "shout"}}] and pool.source.info["format"] == "tag"
    random.seed(1)
    expected = random.random()
    random.seed(1)
    opened = pool.play(Job("a", PROMPT)).result(LONG)
    assert random.random() == expected, "the random state of this process is its own"
    assert opened == {"opening": [{"role": "user", "content": "h…(cut)o"}], "steps": []}
    with pytest.raises(JobFailed, match="too loud"):
        pool.play(Job("a", PROMPT, 0, (Action("!"),))).result(LONG)
    pool.close()
