"""The producer: fates are recorded once and with their batch, saved while they wait, and errors of work ahead are raised."""

from __future__ import annotations

import threading

import pytest

from gspo.rollout.workers.connection import FleetClosed
from gspo.sampling.dynamic import DynamicSampler
from gspo.sampling.errors import GenerationLimit
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


def plain_and_produced(**values) -> tuple[World, Producer, list[tuple[int, str, str, int]]]:
    """A plain world, and a producer over another one of the same settings with the records that it has passed on."""
    rule = mixed_when(lambda number: number % 3 == 0)
    plain, inner = World(rule, **values), World(rule, **values)
    settings = SamplingSettings(**{"train_batch_size": 4, "n": 2, "params": PARAMS, **values})
    records: list[tuple[int, str, str, int]] = []
    producer = Producer(
        lambda record: DynamicSampler(inner.source, inner.engine, inner.scorer, settings, seed=0, record=record),
        lambda group, fate, version: records.append((group.submission, group.prompt.uid, fate, version)),
    )
    return plain, producer, records


@pytest.mark.parametrize("values", [{"max_staleness": 0}, {"strategy": "rounds", "gen_batch_size": 6}])
def test_without_work_ahead_a_producer_gives_the_batches_counts_and_records_of_the_sampler(values):
    plain, producer, records = plain_and_produced(**values)
    try:
        for step in range(4):
            groups, report = producer.next_batch()
            expected, counts = plain.sampler.next_batch()
            assert [(g.submission, g.version) for g in groups] == [(g.submission, g.version) for g in expected]
            assert report == counts and records == plain.records
            producer.release(groups)
            plain.sampler.release(expected)
            state = producer.state_dict()
            assert state.pop(UNRECORDED) == [] and state == plain.sampler.state_dict()
            assert producer.version == step + 1
    finally:
        producer.close()


def test_fates_of_a_step_that_gave_no_batch_are_recorded_with_the_next_one():
    _, producer, records = plain_and_produced(
        strategy="rounds", gen_batch_size=6, max_num_gen_batches=1, on_limit="raise"
    )
    try:
        with pytest.raises(GenerationLimit):
            producer.next_batch()
        assert records == []
        state = producer.state_dict()
        assert [(group["submission"], fate, version) for group, fate, version in state[UNRECORDED]] == [
            (submission, "all_wrong", 0) for submission in (1, 2, 4, 5)
        ]
        groups, _ = producer.next_batch()
        assert [(s, fate) for s, _, fate, _ in records if fate == "all_wrong"] == [
            (s, "all_wrong") for s in (1, 2, 4, 5, 7, 8, 10, 11)
        ]
        assert [g.submission for g in groups] == [0, 3, 6, 9]
    finally:
        producer.close()


def test_a_state_of_a_plain_sampler_loads_and_a_closed_producer_refuses_work():
    _, producer, records = plain_and_produced(max_staleness=0)
    try:
        producer.load_state_dict({"version": 3})
        assert producer.version == 3
        _, report = producer.next_batch()
        assert report.version == 3 and {version for *_, version in records} == {3}
    finally:
        producer.close()
        producer.close()
    with pytest.raises(FleetClosed):
        producer.next_batch()
    with pytest.raises(FleetClosed):
        producer.release([])


def test_an_engine_that_was_closed_ends_work_ahead_without_an_error(produced):
    engine, stopped = produced.world.engine, threading.Event()
    groups, _ = produced.producer.next_batch()
    step = engine.step

    def closed():
        stopped.set()
        raise FleetClosed

    engine.step = closed
    produced.producer.release(groups)
    assert stopped.wait(30)
    engine.step = step
    assert len(produced.producer.next_batch()[0]) == 4
