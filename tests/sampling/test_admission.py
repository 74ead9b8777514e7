"""How many groups are started: by free slots where the engine knows them, and surplus where nothing may be carried."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

from gspo.sampling.admission import Admission
from gspo.sampling.settings import SamplingSettings
from gspo.sampling.step_counts import SamplingCounts
from gspo.types import Group, Reward, Rollout
from tests.sampling.world import PARAMS, TokenEngine, World, always_mixed, mixed_when


class SlotEngine(TokenEngine):
    """Counts responses, as an engine with a slot for each of them does."""

    def num_wanted(self, limit: int) -> int:
        return limit - self.num_running

    @property
    def num_running(self) -> int:
        return sum(
            len(tokens) < self._lengths(self._requests[s], i)
            for s, responses in self._tokens.items()
            for i, tokens in enumerate(responses)
        )


def world_of_slots(**settings) -> World:
    """Groups of one short and one long response."""
    return World(always_mixed, lengths=lambda request, i: 2 if i else 9, engine=SlotEngine, **settings)


def test_slots_of_short_answers_are_given_to_new_groups_at_once():
    world = world_of_slots(max_staleness=3)
    running: list[int] = []
    step = world.engine.step
    world.engine.step = lambda: (running.append(world.engine.num_running), step())[1]
    for _ in range(6):
        world.step()
    assert set(running[8:]) <= {8, 9}, "four groups of two responses have eight slots, and a group starts whole"


def test_free_slots_never_exceed_the_staleness_budget():
    world = world_of_slots(max_staleness=1)
    most = 0
    for _ in range(6):
        _, report = world.step()
        most = max(most, report.num_carried)
        assert report.staleness_max <= 1
    assert 0 < most <= 4, "two batches of four, one of which was handed out"


def test_a_limit_of_groups_in_flight_is_kept_where_it_is_set():
    world = world_of_slots(max_staleness=3, max_in_flight=4)
    for _ in range(4):
        world.step()
    assert world.engine.max_in_flight == 4


def one_of_three(**settings) -> World:
    return World(mixed_when(lambda p: p % 3 == 0), prompts=300, max_staleness=0, **settings)


def test_without_staleness_a_step_starts_what_it_expects_to_need_and_drops_the_rest():
    world = one_of_three()
    world.step()
    before = world.engine.num_steps
    groups, report = world.step()
    assert world.engine.num_steps - before <= 4, "one round, not one for each third that is kept"
    assert report.num_submitted >= 10 and report.num_trained == 4 and report.num_carried == 0
    assert all(g.version == 1 for g in groups) and world.engine.num_in_flight == 0


def test_the_batch_is_the_first_kept_groups_however_slow_they_are():
    slow = {17, 20}
    world = one_of_three(lengths=lambda request, i: 30 if request.submission in slow else 1)
    kept: list[Group] = []
    for _ in range(6):
        groups, _ = world.step()
        judged = {submission for submission, _, fate, _ in world.records if fate not in ("surplus",)}
        trained = [g.submission for g in groups]
        lost = [s for s in range(trained[0], trained[-1]) if s not in judged and s not in trained]
        assert lost == [], "every group before the last one trained on was judged"
        kept += groups
    assert len(kept) == 24


def test_prompts_of_surplus_groups_are_generated_again_and_none_is_lost():
    world = one_of_three(epochs=1)
    trained: list[str] = []
    for _ in range(20):
        groups, _ = world.step()
        trained += [g.prompt.uid for g in groups]
    assert len(trained) == len(set(trained)) == 80
    judged = [uid for _, uid, fate, _ in world.records if fate != "surplus"]
    assert len(judged) == len(set(judged)), "a prompt is judged once in an epoch"


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_starts_the_same_groups(stop):
    whole, first = one_of_three(), one_of_three()
    expected = [[g.submission for g in whole.step()[0]] for _ in range(6)]
    got = [[g.submission for g in first.step()[0]] for _ in range(stop)]
    state = json.loads(json.dumps(first.sampler.state_dict()))
    resumed = one_of_three(state=state)
    resumed.engine.version = resumed.sampler.version
    got += [[g.submission for g in resumed.step()[0]] for _ in range(6 - stop)]
    assert got == expected


class CountingEngine(TokenEngine):
    """Counts the tokens it has written."""

    num_tokens = 0

    def _token(self, *place: Any) -> tuple[int, float, int]:
        self.num_tokens += 1
        return super()._token(*place)


def irregular(**settings) -> World:
    """Groups of many lengths, kept now and then: a step ends while others are half written."""
    keep, lengths = mixed_when(lambda p: p * p % 7 in (1, 2)), lambda request, i: 1 + (request.submission * 5 + i) % 7
    return World(keep, prompts=300, max_staleness=0, lengths=lengths, engine=CountingEngine, **settings)


def test_every_token_is_trained_on_or_wasted_and_dropped_prompts_come_again():
    world, trained, wasted, dropped, generated = irregular(), 0, 0, 0, 0
    for _ in range(8):
        groups, report = world.step()
        generated += report.generated_tokens
        trained, wasted = trained + sum(g.num_tokens for g in groups), wasted + report.wasted_tokens
        dropped += report.discarded["surplus"]
    assert dropped > 0 and trained + wasted == generated == world.engine.num_tokens
    judged = {int(uid[1:]) for _, uid, fate, _ in world.records if fate != "surplus"}
    assert judged >= set(range(min(int(g.prompt.uid[1:]) for g in groups)))


class TurnEngine(CountingEngine):
    """Every second token is an observation; every response has a branch of one token."""

    def _rollouts(self, submission: int, finish: Any) -> tuple[Rollout, ...]:
        branch = Rollout((1,), (0.0,), (1,), (0,), "stop")
        return tuple(
            dataclasses.replace(r, loss_mask=tuple((i + 1) % 2 for i in range(len(r.token_ids))), branches=(branch,))
            for r in super()._rollouts(submission, finish)
        )


def test_tokens_are_counted_that_the_model_wrote_in_rollouts_with_and_without_rewards():
    def rule(group: Group, i: int) -> Reward | None:
        return None if i == 2 else mixed_when(lambda p: p % 3 == 0)(group, i)

    lengths = lambda request, i: 2 + request.submission % 5  # noqa: E731
    world = World(
        rule, n=3, prompts=300, max_staleness=0, lengths=lengths, engine=TurnEngine, max_failure_rate=1.0, reward_lag=2
    )
    for _ in range(4):
        groups, report = world.step()
        assert report.discarded["surplus"] > 0
        assert report.generated_tokens - report.wasted_tokens == sum(g.num_tokens for g in groups)
    first = groups[0]
    turns = (2 + first.submission % 5 + 1) // 2
    assert len(first.rollouts) == 2 and first.num_tokens == 3 * (turns + 1)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_resumed_run_starts_as_many_groups_where_the_share_kept_varies(stop):
    def play(world: World, steps: int) -> list[tuple[int, list[int]]]:
        done = [world.step() for _ in range(steps)]
        return [(report.num_submitted, [g.submission for g in groups]) for groups, report in done]

    first = irregular()
    got = play(first, stop)
    resumed = irregular(state=json.loads(json.dumps(first.sampler.state_dict())))
    resumed.engine.version = resumed.sampler.version
    assert got + play(resumed, 6 - stop) == play(irregular(), 6)


class RoomyEngine(TokenEngine):
    def num_wanted(self, limit: int) -> int:
        return 1000


def test_groups_are_started_for_what_the_batch_lacks_by_the_share_of_this_step_and_the_last():
    settings = SamplingSettings(train_batch_size=4, n=2, params=PARAMS, max_staleness=0)
    admission = Admission(settings, RoomyEngine(lambda request, i: 1))
    admission.last_judged = (4, 12)
    report = SamplingCounts(0, 4, 4, fates=Counter(kept=1, all_wrong=2))
    assert report.num_generated == 3
    # (4 + 1 + 1) of (12 + 3 + 1) are kept, so three more need eight groups, of which two are pending.
    assert admission.room(report, num_in_flight=1, num_scoring=1, num_queued=1, num_training=0) == 6


class WantingEngine(TokenEngine):
    """Asks for a number of responses, and remembers with which limit it was asked."""

    wanted: int | None = None
    limit: int | None = None

    def num_wanted(self, limit: int) -> int | None:
        self.limit = limit
        return self.wanted


def room_of(
    counts: tuple[int, int, int, int],
    *,
    wanted: int | None = None,
    held: int | None = None,
    submitted: int = 0,
    **settings: Any,
) -> tuple[int, int | None]:
    """What may be started with (in flight, scoring, queued, training), and the limit that the engine was asked with."""
    engine = WantingEngine(lambda request, i: 1)
    engine.wanted = wanted
    values = SamplingSettings(**{"train_batch_size": 4, "n": 3, "params": PARAMS, **settings})
    admission = Admission(values, engine, None if held is None else lambda: held)
    report = SamplingCounts(0, values.generation_batch, 4, num_submitted=submitted)
    return admission.room(report, *counts), engine.limit


@pytest.mark.parametrize(
    ("counts", "given", "room"),
    [
        # The stream: four in flight by default, twelve outstanding in all, of which handed out groups are part.
        ((1, 5, 0, 0), {}, 3),
        ((1, 5, 2, 3), {}, 1),
        ((2, 5, 2, 4), {}, 0),
        ((0, 6, 0, 4), {}, 2),
        ((1, 0, 0, 0), {"gen_batch_size": 6}, 5),
        ((1, 0, 0, 0), {"max_in_flight": 2}, 1),
        # An engine with slots: seven free ones of three each begin three groups, whatever is in flight.
        ((9, 0, 0, 0), {"wanted": 7}, 3),
        ((9, 0, 0, 0), {"wanted": 6}, 2),
        ((9, 0, 0, 0), {"wanted": 0}, 0),
        ((9, 0, 1, 0), {"wanted": 30}, 2),
        ((1, 0, 0, 0), {"wanted": 30, "max_in_flight": 2}, 1),
        # What the engine holds now, within the budget of twelve.
        ((2, 0, 0, 0), {"held": 7, "wanted": 30}, 5),
        ((2, 0, 0, 0), {"held": 70}, 10),
        ((2, 0, 0, 0), {"held": 7, "max_in_flight": 3}, 5),
        # A limit of generation batches counts what this step has submitted.
        ((0, 0, 0, 0), {"max_num_gen_batches": 2, "submitted": 6}, 2),
        ((0, 0, 0, 0), {"max_num_gen_batches": 2, "submitted": 8}, 0),
        ((3, 0, 0, 0), {"max_num_gen_batches": 2, "submitted": 3}, 1),
        # Rounds: a whole generation batch once nothing is pending, whatever is queued or in training.
        ((0, 0, 3, 4), {"strategy": "rounds", "gen_batch_size": 6}, 6),
        ((1, 0, 0, 0), {"strategy": "rounds"}, 0),
        ((0, 1, 0, 0), {"strategy": "rounds"}, 0),
        ((0, 0, 0, 0), {"strategy": "rounds", "gen_batch_size": 6, "max_num_gen_batches": 2, "submitted": 8}, 4),
    ],
)
def test_the_room_for_new_groups(counts, given, room):
    assert room_of(counts, **given)[0] == room


def test_an_engine_with_slots_is_asked_for_the_responses_of_all_groups_in_flight():
    assert room_of((0, 0, 0, 0), wanted=1, gen_batch_size=6) == (1, 18)
    assert room_of((0, 0, 0, 0), wanted=1, max_in_flight=2) == (2, None), "a limit in groups is kept in groups"


def test_surplus_is_started_within_the_slots_and_less_what_is_pending():
    for counts, wanted, room in [((0, 0, 0, 0), 300, 4), ((1, 2, 0, 0), 300, 1), ((0, 0, 3, 0), 300, 1)]:
        assert room_of(counts, wanted=wanted, max_staleness=0)[0] == room
    assert room_of((0, 0, 0, 0), wanted=5, max_staleness=0)[0] == 2
