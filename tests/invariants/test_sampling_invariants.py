"""What must hold of the sampler for any data, lengths, failures and settings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo.sampling.errors import DataExhausted, SamplingError
from gspo.seeding import derive_seed
from gspo.types import Group, Reward
from tests.sampling.world import World, number

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FINAL_FATES = ("kept", "unfiltered", "all_right", "all_wrong", "same_score", "reward_failed")


def uniform(*counters: int) -> float:
    return derive_seed(0, "test", *counters) / 2**63


@st.composite
def worlds(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    """The arguments of a random world; its rewards and lengths are hashes, so that it can be built twice."""
    salt = draw(st.integers(0, 10**6))
    difficulty = draw(st.sampled_from([0.2, 0.5, 0.9]))
    failing = draw(st.sampled_from([0.0, 0.0, 0.1]))
    longest = draw(st.sampled_from([1, 3, 12]))

    def rule(group: Group, i: int) -> Reward | None:
        if uniform(salt, 1, group.submission, i) < failing:
            return None
        right = uniform(salt, 2, group.submission, i) < (difficulty + number(group) / 50) % 1
        return Reward(float(right), acc=float(right), extra={"x": i / 3})

    values = {
        "rule": rule,
        "lengths": lambda request, i: 1 + int(longest * uniform(salt, 3, request.submission, i)),
        "prompts": draw(st.integers(1, 60)),
        "epochs": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 3)),
        "slots": draw(st.sampled_from([2, 5, 10**9])),
        "shuffle": draw(st.booleans()),
        "n": draw(st.integers(1, 4)),
        "train_batch_size": draw(st.integers(1, 6)),
        "gen_batch_size": draw(st.sampled_from([None, 1, 5, 16])),
        "strategy": draw(st.sampled_from(["stream", "stream", "rounds"])),
        "max_staleness": draw(st.integers(0, 3)),
        "max_in_flight": draw(st.sampled_from([None, 1, 7, 100])),
        "max_num_gen_batches": draw(st.sampled_from([0, 0, 3])),
        "on_limit": draw(st.sampled_from(["train_partial", "keep_unfiltered"])),
        "predict": draw(st.sampled_from(["off", "off", "skip"])),
        "max_failure_rate": 1.0,
        "enable": draw(st.sampled_from([True, True, False])),
    }
    return {**values, **fixed}


def run(world: World, steps: int = 40) -> list[list[Group]]:
    """Train until the data ends, sampling starves, or `steps` are done."""
    batches = []
    for _ in range(steps):
        try:
            batches.append(world.step()[0])
        except SamplingError:
            break
    return batches


@EXAMPLES
@given(worlds(predict="off"))
def test_no_prompt_is_lost_or_used_twice_in_an_epoch(arguments):
    world = World(**arguments)
    with pytest.raises(SamplingError) as caught:
        while True:
            world.step()
    if not isinstance(caught.value, DataExhausted):
        return  # starved: the data was not used up
    ends = Counter(uid for _, uid, fate, _ in world.records if fate in FINAL_FATES)
    leftover = [packed["uid"] for packed in world.sampler.state_dict()["kept"]]
    ends.update(leftover)
    assert len(leftover) == caught.value.num_leftover < arguments["train_batch_size"]
    assert ends == {f"p{i}": arguments["epochs"] for i in range(arguments["prompts"])}


@EXAMPLES
@given(worlds())
def test_every_group_has_one_fate_and_every_batch_its_order_and_age(arguments):
    world = World(**arguments)
    limit = arguments["max_staleness"] if arguments["strategy"] == "stream" else 0
    capacity = (arguments["max_staleness"] + 1) * arguments["train_batch_size"]
    for version in range(30):
        try:
            groups, report = world.step()
        except SamplingError:
            break
        submissions = [g.submission for g in groups]
        assert submissions == sorted(set(submissions))
        assert 1 <= len(groups) <= arguments["train_batch_size"]
        assert all(0 <= version - g.version <= limit for g in groups)
        assert report.version == version
        if arguments["strategy"] == "stream":
            assert world.engine.max_in_flight <= capacity
            assert report.num_carried <= capacity - len(groups)
    recorded = [submission for submission, *_ in world.records]
    assert len(recorded) == len(set(recorded))


@EXAMPLES
@given(worlds(max_num_gen_batches=0, on_limit="raise", strategy="stream"))
def test_full_batches_leave_nothing_to_grow_stale(arguments):
    world = World(**arguments)
    assert all(len(b) == arguments["train_batch_size"] for b in run(world))
    assert not world.fates("stale_dropped")


@EXAMPLES
@given(worlds())
def test_a_run_resumed_at_every_step_gives_the_same_bits(arguments):
    whole = World(**arguments)
    batches = run(whole, steps=8)
    records, state, resumed = [], None, []
    for _ in range(8):
        world = World(**arguments, state=state)
        try:
            resumed.append(world.step()[0])
        except SamplingError:
            records += world.records
            break
        records += world.records
        state = json.loads(json.dumps(world.sampler.state_dict(), allow_nan=False))
    assert resumed == batches
    assert records == whole.records


@EXAMPLES
@given(worlds())
def test_saving_changes_nothing(arguments):
    plain, saving = World(**arguments), World(**arguments)
    batches = run(plain, steps=8)
    saved = []
    for _ in batches:
        saved.append(saving.step()[0])
        saving.sampler.state_dict()
    assert saved == batches


@settings(EXAMPLES, max_examples=15)
@given(worlds(prompts=30))
def test_batches_do_not_depend_on_how_long_rewards_take(arguments):
    quick, slow = World(**arguments), World(**arguments, delay=lambda g: 0.002 * uniform(g.submission, 9))
    try:
        assert run(slow, steps=5) == run(quick, steps=5)
        assert slow.records == quick.records
    finally:
        slow.scorer.close()


@EXAMPLES
@given(worlds(strategy="stream", max_staleness=0, on_limit="raise", predict="off"))
def test_on_policy_batches_hold_the_same_prompts_however_fast_the_engine(arguments):
    """The kept prompts of a step depend on the order of submission only, not on which group finishes first."""
    narrow = World(**{**arguments, "slots": 1, "max_in_flight": 1, "max_num_gen_batches": 0})
    wide = World(**{**arguments, "slots": 10**9, "max_in_flight": 100, "max_num_gen_batches": 0})
    for one, other in zip(run(narrow, steps=6), run(wide, steps=6)):
        assert [g.submission for g in one] == [g.submission for g in other]
        assert [g.prompt.uid for g in one] == [g.prompt.uid for g in other]
