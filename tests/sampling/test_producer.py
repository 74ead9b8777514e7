"""The producer: fates are recorded once and with their batch, saved while they wait, and errors of work ahead are raised."""

from __future__ import annotations

import threading

import pytest

from gspo.sampling.dynamic import DynamicSampler
from gspo.sampling.producer import UNRECORDED, Producer
from gspo.sampling.settings import SamplingSettings
from tests.sampling.world import PARAMS, World, mixed_when

SETTINGS = SamplingSettings(train_batch_size=4, n=2, params=PARAMS, max_staleness=3, max_in_flight=16)


class Produced:
    """A producer over a world in which every second prompt is dropped; `records` are what it has told."""

    def __init__(self) -> None:
        self.world = World(mixed_when(lambda number: number % 2 == 0), prompts=400)
        self.records: list[tuple[int, str]] = []
        self.producer = Producer(self._make, lambda group, fate, version: self.records.append((group.submission, fate)))

    def _make(self, record) -> DynamicSampler:
        world = self.world
        return DynamicSampler(world.source, world.engine, world.scorer, SETTINGS, seed=0, record=record)

    def step(self) -> list[int]:
        groups, _ = self.producer.next_batch()
        self.world.engine.load_weights(None, self.producer.version + 1)
        self.producer.release(groups)
        return [g.submission for g in groups]

    def state_with_waiting_fates(self) -> dict:
        """A state saved when work ahead has dropped groups whose batch is not handed out yet."""
        for _ in range(2000):
            state = self.producer.state_dict()
            if state[UNRECORDED]:
                return state
        raise AssertionError("work ahead dropped nothing")


@pytest.fixture
def produced():
    made = Produced()
    yield made
    made.producer.close()


def test_every_fate_is_told_once_with_the_batch_that_ends_its_step(produced):
    trained = []
    for _ in range(6):
        before = len(produced.records)
        trained += produced.step()
        told = produced.records[before:]
        assert sorted(s for s, fate in told if fate == "kept") == sorted(trained[-4:])
    assert len(set(produced.records)) == len(produced.records)
    dropped = {s for s, fate in produced.records if fate != "kept"}
    assert dropped and dropped.isdisjoint(trained) and len(trained) == len(set(trained)) == 24


def test_fates_that_wait_are_part_of_a_checkpoint(produced):
    produced.step()
    told = set(produced.records)
    state = produced.state_with_waiting_fates()
    waiting = {(group["submission"], fate) for group, fate, _ in state[UNRECORDED]}
    assert waiting.isdisjoint(told)
    resumed = Produced()
    resumed.world.engine.load_weights(None, state["version"])
    resumed.producer.load_state_dict(state)
    try:
        resumed.step()
        assert waiting <= set(resumed.records)
    finally:
        resumed.producer.close()


def test_an_error_of_work_ahead_is_raised_by_the_next_batch_once(produced):
    engine = produced.world.engine
    step, ahead, raised = engine.step, threading.Event(), threading.Event()

    def failing():
        if ahead.is_set() and not raised.is_set():
            raised.set()
            raise RuntimeError("lost while working ahead")
        return step()

    engine.step = failing
    groups, _ = produced.producer.next_batch()
    ahead.set()
    engine.load_weights(None, 1)
    produced.producer.release(groups)  # wakes the producer, which goes on working
    assert raised.wait(30)
    with pytest.raises(RuntimeError, match="lost while working ahead"):
        produced.producer.next_batch()
    assert len(produced.producer.next_batch()[0]) == 4
