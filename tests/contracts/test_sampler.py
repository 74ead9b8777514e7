"""The Sampler contract, run on the dynamic sampler and on the producer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gspo.data.cursor import PromptCursor
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.sampling.dynamic import DynamicSampler, Record
from gspo.sampling.errors import DataExhausted
from gspo.sampling.producer import Producer
from gspo.sampling.sampler import Sampler
from gspo.sampling.settings import SamplingSettings
from gspo.types import Group, Prompt
from tests.sampling.world import PARAMS, ScriptedScorer, make_prompts, mixed_when

BATCH = 3
Start = Callable[..., "Started"]


def answer(prompt: Prompt, submission: int, response: int) -> ScriptedAnswer:
    return ScriptedAnswer((1,) * (1 + (submission * 5 + response) % 4) + (0,))


class Started:
    """A sampler with its engine and the fates it recorded."""

    def __init__(self, make: Any, max_staleness: int, epochs: int | None, state: dict[str, Any] | None) -> None:
        version = 0 if state is None else state["version"]
        self.engine = ScriptedEngine(answer, num_slots=4, version=version)
        self.fates: list[tuple[int, str]] = []
        settings = SamplingSettings(train_batch_size=BATCH, n=2, params=PARAMS, max_staleness=max_staleness)
        source = PromptCursor(make_prompts(24), seed=3, shuffle=True, total_epochs=epochs)
        scorer = ScriptedScorer(mixed_when(lambda prompt: prompt % 3 != 0))

        def build(record: Record) -> DynamicSampler:
            return DynamicSampler(source, self.engine, scorer, settings, seed=3, record=record)

        self.sampler: Sampler = make(build, lambda group, fate, version: self.fates.append((group.submission, fate)))
        if state is not None:
            self.sampler.load_state_dict(state)

    def step(self) -> list[Group]:
        groups, _ = self.sampler.next_batch()
        self.engine.load_weights(None, self.sampler.version + 1)
        self.sampler.release(groups)
        return groups

    def close(self) -> None:
        self.engine.close()
        self.sampler.close()


class SamplerContract:
    make: Any

    @pytest.fixture
    def start(self) -> Iterator[Start]:
        started: list[Started] = []

        def make(max_staleness: int = 2, epochs: int | None = None, state: dict[str, Any] | None = None) -> Started:
            started.append(Started(type(self).make, max_staleness, epochs, state))
            return started[-1]

        yield make
        for each in started:
            each.close()

    def test_a_batch_is_whole_and_in_order_of_submission(self, start: Start) -> None:
        world = start()
        for _ in range(4):
            submissions = [group.submission for group in world.step()]
            assert len(submissions) == BATCH and submissions == sorted(submissions)

    def test_no_group_exceeds_the_staleness_bound(self, start: Start) -> None:
        world = start(max_staleness=1)
        for version in range(6):
            groups, counts = world.sampler.next_batch()
            assert world.sampler.version == version == counts.version
            assert all(version - group.version <= 1 for group in groups)
            world.engine.load_weights(None, version + 1)
            world.sampler.release(groups)

    def test_a_fate_is_recorded_once_and_by_the_end_of_its_step(self, start: Start) -> None:
        world = start()
        for _ in range(5):
            trained = [group.submission for group in world.step()]
            assert set(trained) <= {submission for submission, fate in world.fates if fate == "kept"}
        assert max(Counter(submission for submission, _ in world.fates).values()) == 1

    def test_a_resumed_sampler_gives_the_same_batches(self, start: Start) -> None:
        """With a bound of 0 nothing runs ahead, so that every call decides the same."""
        whole, first = start(max_staleness=0), start(max_staleness=0)
        expected = [whole.step() for _ in range(6)]
        assert [first.step() for _ in range(3)] == expected[:3]
        second = start(max_staleness=0, state=json.loads(json.dumps(first.sampler.state_dict())))
        assert second.sampler.version == 3
        assert [second.step() for _ in range(3)] == expected[3:]

    def test_a_resumed_sampler_loses_no_prompt(self, start: Start) -> None:
        first = start(epochs=1)
        trained = [group.prompt.uid for _ in range(2) for group in first.step()]
        second = start(epochs=1, state=json.loads(json.dumps(first.sampler.state_dict())))
        with pytest.raises(DataExhausted) as end:
            while True:
                trained += [group.prompt.uid for group in second.step()]
        assert max(Counter(trained).values()) == 1
        assert len(trained) + end.value.num_leftover == 16  # of 24 prompts every third is filtered

    def test_the_last_batch_must_be_released_first(self, start: Start) -> None:
        world = start()
        groups, _ = world.sampler.next_batch()
        with pytest.raises(RuntimeError, match="release"):
            world.sampler.next_batch()
        world.sampler.release(groups)
        world.sampler.next_batch()


class TestDynamicSampler(SamplerContract):
    make = staticmethod(lambda build, record: build(record))


class TestProducer(SamplerContract):
    make = staticmethod(Producer)
