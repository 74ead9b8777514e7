"""The queue, the budget, the reserve, the settings and the packed state."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from gspo.rollout.engine import GroupRequest
from gspo.sampling.group_json import pack_group, pack_request, unpack_group, unpack_request
from gspo.sampling.kept_groups import KeptQueue, Reserve
from gspo.sampling.settings import SamplingSettings
from gspo.sampling.staleness import StalenessBudget
from gspo.types import Group, Prompt, Reward, Rollout, Turn
from tests.sampling.world import PARAMS

PROMPT = Prompt("u", (), (1,))


def numbered(submission: int, version: int = 0) -> Group:
    return Group(PROMPT, (), submission, version)


def numbers(groups: list[Group]) -> list[int]:
    return [g.submission for g in groups]


def test_queue_takes_the_lowest_and_counts_by_version():
    queue = KeptQueue()
    for s in (5, 1, 9, 3):
        queue.push(numbered(s, version=s // 4))
    assert (len(queue), numbers(queue.groups()), queue.versions) == (4, [1, 3, 5, 9], {0: 2, 1: 1, 2: 1})
    assert numbers(queue.take(3)) == [1, 3, 5]
    assert queue.versions == {2: 1}
    assert numbers(queue.take(3)) == [9]
    assert not queue.versions


def test_queue_removes_in_order():
    queue = KeptQueue()
    for s in (4, 2, 8, 6):
        queue.push(numbered(s, version=s % 4))
    assert numbers(queue.remove(lambda g: g.version == 0)) == [4, 8]
    assert (numbers(queue.groups()), queue.versions) == ([2, 6], {2: 2})


def test_queue_names_the_last_of_the_lowest_and_leaves_them():
    queue = KeptQueue()
    for s in (5, 1, 9, 3):
        queue.push(numbered(s))
    assert [queue.last_of(count) for count in (1, 2, 4)] == [1, 3, 9]
    assert numbers(queue.groups()) == [1, 3, 5, 9]


def test_budget():
    budget = StalenessBudget(batch_size=8, max_staleness=2)
    assert (budget.capacity, budget.room(20), budget.room(30)) == (24, 4, 0)
    assert [budget.is_stale(3, v) for v in (3, 5, 6)] == [False, False, True]


@pytest.mark.parametrize(
    ("pending", "queued", "waits"),
    [
        ({}, {5: 8}, False),
        ({5: 16}, {5: 8}, False),  # all fit into the steps 6 and 7
        ({5: 17}, {5: 8}, True),
        ({3: 1}, {4: 8}, True),  # its last step
        ({3: 1}, {3: 7, 4: 1}, True),
        ({2: 1}, {4: 8}, False),  # too old already: nothing to wait for
        ({4: 8}, {5: 8}, False),  # they fit into the next step
        ({4: 9}, {5: 8}, True),
        ({4: 1}, {4: 16, 5: 8}, True),  # one more than the next step holds
        ({5: 1}, {3: 16}, False),  # nothing pending is in danger
    ],
)
def test_a_step_waits_only_for_a_group_that_would_miss_its_deadline(pending, queued, waits):
    assert StalenessBudget(batch_size=8, max_staleness=2).must_wait(pending, queued, version=5) is waits


def misses_its_deadline(pending: dict[int, int], queued: dict[int, int], version: int, batch: int, bound: int) -> bool:
    """Take the oldest batch, then one batch in every later step, oldest first: is a group late behind a pending one?"""
    queue = sorted(v for v, count in queued.items() for _ in range(count) if v + bound >= version)
    waiting = [v for v, count in pending.items() for _ in range(count) if v + bound >= version]
    for place, group in enumerate(sorted(queue[batch:] + waiting)):
        trained_at = version + 1 + place // batch
        if trained_at > group + bound and any(v <= group for v in waiting):
            return True
    return False


def test_a_step_waits_exactly_when_taking_the_oldest_first_would_be_too_late():
    rng = random.Random(1)
    waited = 0
    for _ in range(1500):
        batch, bound = rng.randint(1, 3), rng.randint(0, 3)
        pending, queued = (
            {v: rng.randint(0, 4) for v in rng.sample(range(35, 41), rng.randint(0, 4))} for _ in range(2)
        )
        expected = misses_its_deadline(pending, queued, 40, batch, bound)
        assert StalenessBudget(batch, bound).must_wait(pending, queued, version=40) is expected, (pending, queued)
        waited += expected
    assert 300 < waited < 1200


def test_reserve_holds_the_earliest():
    reserve = Reserve(2)
    spare = [reserve.add(numbered(s), "all_wrong") for s in (7, 3, 9, 1)]
    assert [[g.submission for g, _ in s] for s in spare] == [[], [], [], [7, 9]]
    assert [g.submission for g, _ in reserve.take(1)] == [1]
    assert [g.submission for g, _ in reserve.clear()] == [3]
    assert Reserve(0).add(numbered(1), "all_right") == [(numbered(1), "all_right")]
    assert reserve.clear() == [] and reserve.take(2) == []


def test_a_reserve_of_any_size_gives_back_every_group_once_and_keeps_the_earliest():
    for size in (1, 2, 3):
        reserve, order = Reserve(size), random.Random(size).sample(range(20), 20)
        spare = [item for s in order for item in reserve.add(numbered(s), f"why {s}")]
        held = reserve.take(size)
        assert [g.submission for g, _ in held] == list(range(size))
        everything = spare + held + reserve.clear()
        assert sorted((g.submission, why) for g, why in everything) == [(s, f"why {s}") for s in range(20)]


@pytest.mark.parametrize(
    ("values", "concurrency"),
    [
        ({}, 4),
        ({"gen_batch_size": 12}, 12),
        ({"gen_batch_size": 100}, 12),
        ({"gen_batch_size": 2}, 4),
        ({"gen_batch_size": 12, "max_staleness": 0}, 4),
        ({"max_in_flight": 3}, 3),
        ({"max_in_flight": 50, "max_staleness": 1}, 8),
    ],
)
def test_concurrency_is_a_generation_batch_within_the_budget(values, concurrency):
    settings = SamplingSettings(train_batch_size=4, n=2, params=PARAMS, **values)
    assert settings.concurrency == concurrency


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_batch_size", 0),
        ("n", 0),
        ("gen_batch_size", 0),
        ("strategy", "batch"),
        ("on_limit", "stop"),
        ("max_staleness", -1),
        ("max_in_flight", 0),
        ("predict", "on"),
        ("predict_min_prob", 0.0),
        ("predict_discount", 1.5),
        ("max_failure_rate", -0.1),
        ("predict_min_prob", 1.01),
        ("predict_discount", 0.0),
        ("reward_lag", 0),
        ("min_spread", -0.1),
        ("max_failure_rate", 1.01),
    ],
)
def test_bad_settings_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value!r}: expected "):
        SamplingSettings(**{"train_batch_size": 4, "n": 2, "params": PARAMS, name: value})


def made(**values) -> SamplingSettings:
    return SamplingSettings(**{"train_batch_size": 4, "n": 2, "params": PARAMS, **values})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("train_batch_size", [1]),
        ("n", [1]),
        ("gen_batch_size", [1, None]),
        ("strategy", ["stream", "rounds"]),
        ("on_limit", ["raise", "train_partial", "keep_unfiltered"]),
        ("max_staleness", [0]),
        ("max_in_flight", [1, None]),
        ("predict", ["off", "skip"]),
        ("predict_min_prob", [0.01, 1.0]),
        ("predict_discount", [0.01, 1.0]),
        ("reward_lag", [1]),
        ("min_spread", [0.0]),
        ("max_failure_rate", [0.0, 1.0]),
    ],
)
def test_settings_at_the_end_of_their_range_are_good(name, values):
    assert [getattr(made(**{name: value}), name) for value in values] == values


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"max_num_gen_batches": 3, "gen_batch_size": 6}, 18),
        ({"max_num_gen_batches": 1}, 4),
        ({"max_num_gen_batches": 0, "gen_batch_size": 6}, None),
        ({"max_num_gen_batches": -1}, None),
    ],
)
def test_the_limit_of_a_step_is_counted_in_generation_batches(values, limit):
    assert made(**values).submission_limit == limit


@pytest.mark.parametrize(
    ("values", "surplus"),
    [
        ({"max_staleness": 0}, True),
        ({"max_staleness": 1}, False),
        ({"max_staleness": 0, "strategy": "rounds"}, False),
        ({"max_staleness": 0, "enable": False}, False),
        ({"max_staleness": 0, "max_in_flight": 8}, False),
    ],
)
def test_surplus_is_started_only_by_a_filtered_stream_that_may_carry_nothing(values, surplus):
    assert made(**values).starts_surplus is surplus


def rollout(**changes) -> Rollout:
    values = {
        "token_ids": (5, 6, 7, 8),
        "log_probs": (-0.1, -1e-38, float("-inf"), -1 / 3),
        "loss_mask": (1, 0, 0, 1),
        "versions": (2, 2, 3, 3),
        "finish_reason": "length",
        "text": "é\n\u2028",
        "reward": Reward(1 / 3, 1.0, {"a": float("nan"), "b": 2.5}, 1e-300),
    }
    return Rollout(**{**values, **changes})


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def test_group_round_trips_to_the_bit():
    group = Group(PROMPT, (rollout(), rollout(reward=None, failure="timeout")), 9, 2)
    back = unpack_group(through_json(pack_group(group)), {"u": PROMPT}.__getitem__)
    assert repr(back) == repr(group)  # repr tells every double apart, and NaN equals itself
    assert back.rollouts[1] == group.rollouts[1]


def test_request_round_trips_to_the_bit():
    request = GroupRequest(PROMPT, 4, 3, 1, PARAMS, 77, (rollout(reward=None), rollout(reward=None, token_ids=())))
    back = unpack_request(through_json(pack_request(request)), {"u": PROMPT}.__getitem__, PARAMS, 77)
    assert back == request


def test_turns_and_what_an_environment_added_to_a_prompt_survive_packing():
    turns = (Turn(0, 2, "a", 0.1, 1, 1, True, "no", {"depth": 2.0}), Turn(3, 4, "b"))
    reward = Reward(0.30000000000000004, turns=(0.1, 0.2))
    rollout = Rollout(
        (5, 6, 7, 8), (-0.1, -0.2, 0.0, -0.3), (1, 1, 0, 1), (0, 0, 0, 1), "turns", "b", reward, turns=turns
    )
    opening = ({"role": "user", "content": "a door"},)
    prompt = dataclasses.replace(PROMPT, messages=(*PROMPT.messages, *opening), token_ids=(9, 8, 7), opening=opening)
    group = Group(prompt, (rollout,), 3, 1)
    assert unpack_group(through_json(pack_group(group)), {"u": PROMPT}.__getitem__) == group
    request = GroupRequest(prompt, 3, 2, 1, PARAMS, 77, (rollout,))
    assert unpack_request(through_json(pack_request(request)), {"u": PROMPT}.__getitem__, PARAMS, 77) == request
    assert group.num_tokens == 3 and rollout.model_token_ids == (5, 6, 8)
