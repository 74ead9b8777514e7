"""What the sampler asks of the engine, and what it notes of every group that comes back."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

from gspo.rollout.engine import GroupRequest
from gspo.sampling.dynamic import DynamicSampler
from gspo.sampling.settings import SamplingSettings
from gspo.sampling.step_counts import SamplingCounts
from gspo.seeding import derive_seed
from gspo.types import Group, Prompt, Reward, Rollout, Turn
from tests.sampling.world import PARAMS, TokenEngine, World, all_right, always_mixed, mixed_when, number


class NotingEngine(TokenEngine):
    """Keeps every request."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.requests: list[GroupRequest] = []

    def submit(self, request: GroupRequest) -> None:
        self.requests.append(request)
        super().submit(request)


def requests_of(world: World) -> list[GroupRequest]:
    assert isinstance(world.engine, NotingEngine)
    return world.engine.requests


def test_every_request_has_the_settings_of_the_run_and_the_version_of_the_weights():
    world = World(always_mixed, n=3, seed=7, max_in_flight=2, max_staleness=0, engine=NotingEngine)
    for _ in range(2):
        world.step()
    found = requests_of(world)
    assert [r.submission for r in found] == list(range(8))
    assert [r.prompt.uid for r in found] == [f"p{i}" for i in range(8)]
    assert [r.version for r in found] == [0] * 4 + [1] * 4
    assert {(r.n, r.params, r.seed, r.partial) for r in found} == {(3, PARAMS, derive_seed(7, "rollout"), ())}


def test_an_unfinished_group_is_resumed_with_its_own_version_and_tokens():
    def world(state=None) -> World:
        lengths = lambda request, i: 9 if request.submission == 1 else 1  # noqa: E731
        return World(always_mixed, n=3, seed=7, gen_batch_size=5, lengths=lengths, engine=NotingEngine, state=state)

    first = world()
    first.step()
    resumed = requests_of(world(json.loads(json.dumps(first.sampler.state_dict()))))
    request = next(r for r in resumed if r.submission == 1)
    assert (request.version, request.n, request.params, request.seed) == (0, 3, PARAMS, derive_seed(7, "rollout"))
    assert [len(part.token_ids) for part in request.partial] == [first.engine.num_steps] * 3


def test_a_branch_starts_its_sampling_anew_under_the_version_of_its_parent():
    world = World(always_mixed, engine=NotingEngine, max_staleness=0, state={"version": 5})
    groups, report = world.step()
    assert [g.submission for g in groups] == [0, 1, 2, 3]
    assert (report.version, {r.version for r in requests_of(world)}, world.sampler.version) == (5, {5}, 6)


def test_a_stale_group_is_counted_and_teaches_nothing():
    lengths = lambda request, i: 4 if request.submission == 1 else 1  # noqa: E731
    world = World(always_mixed, lengths=lengths, max_in_flight=5, max_staleness=1, predict="skip")
    world.step()
    world.sampler.version += 4
    reports = [world.step()[1] for _ in range(3)]
    assert sorted(world.fates("stale_dropped")) == ["p1", "p5", "p6", "p7"], "p1 and those that were being scored"
    assert sum(r.fates["stale_dropped"] for r in reports) == 4
    assert sum(r.discarded["stale_dropped"] for r in reports) == 4
    assert all(r.num_rollouts == 2 * r.num_generated for r in reports), "what was generated, stale or not"
    again = [s for s, uid, fate, _ in world.records if uid == "p1" and fate == "kept"]
    assert again and world.sampler.state_dict()["prompts"]["ledger"]["p1"] == [1.0, 1.0], "learned from one group only"


def test_the_filter_of_the_user_decides_in_the_sampler_and_is_counted():
    world = World(always_mixed)
    seen: list[int] = []
    sampler = DynamicSampler(
        world.source,
        world.engine,
        world.scorer,
        SamplingSettings(train_batch_size=2, n=2, params=PARAMS, max_in_flight=1, min_spread=9.0),
        seed=0,
        watch=lambda kept, needed: seen.append(kept),
        keep=lambda group: number(group) % 3 == 2,
    )
    groups, report = sampler.next_batch()
    assert [number(g) for g in groups] == [2, 5]
    assert dict(report.fates) == {"kept": 2, "filtered": 4}
    assert report.metrics()["train/groups_filtered"].result() == 4
    assert seen[-1] == 2 and max(seen) == 2 and set(seen) == {0, 1, 2}


def test_the_spread_and_the_metric_of_the_settings_are_used():
    rule = lambda group, i: Reward(float(i == 0), extra={"size": 0.5 * (i == 0) * number(group)})  # noqa: E731
    world = World(rule, metric="size", min_spread=1.0, max_in_flight=1)
    assert [number(g) for g in world.step()[0]] == [3, 4, 5, 6]
    assert world.fates("all_wrong") == ["p0"] and world.fates("same_score") == ["p1", "p2"]


@pytest.mark.parametrize(
    ("settings", "rule", "works"),
    [
        ({"max_staleness": 1}, always_mixed, True),
        ({"max_staleness": 0}, always_mixed, False),
        ({"max_staleness": 1, "strategy": "rounds"}, always_mixed, False),
    ],
)
def test_only_a_stream_with_a_budget_works_ahead(settings, rule, works):
    world = World(rule, **settings)
    assert world.sampler.work_ahead() is works
    assert bool(world.engine.num_steps) is works


def test_work_ahead_ends_where_a_pass_kept_nothing():
    world = World(all_right, prompts=6, max_in_flight=1, max_staleness=2)
    ticks = 0
    while world.sampler.work_ahead():
        ticks += 1
    assert world.sampler.state_dict()["dropped_since_kept"] == {"all_right": 6} and ticks == 7


def test_prompts_skipped_while_working_ahead_are_counted_once_and_survive_a_resume():
    def world(state=None) -> World:
        return World(
            mixed_when(lambda p: p % 2 == 0, otherwise=1.0),
            prompts=6,
            n=8,
            max_staleness=3,
            max_in_flight=2,
            predict="skip",
            state=state,
        )

    whole = world()
    total = 0
    for _ in range(8):
        groups, report = whole.sampler.next_batch()
        total += report.num_skipped
        for _ in range(3):
            whole.sampler.work_ahead()
        whole.engine.load_weights(None, whole.sampler.version + 1)
        whole.sampler.release(groups)
        state = json.loads(json.dumps(whole.sampler.state_dict()))
    ahead = state["report"]["num_skipped"]
    assert total > 0 and state["prompts"]["num_drawn"] == total + ahead + state["next_submission"]
    resumed = world(state)
    ours, theirs = whole.sampler.next_batch()[1], resumed.sampler.next_batch()[1]
    assert ours.num_skipped == theirs.num_skipped >= ahead
    assert ours.pack(0) == theirs.pack(0)


def test_groups_reserved_while_working_ahead_survive_a_resume():
    def world(state=None) -> World:
        return World(
            mixed_when(lambda p: p % 8 == 0),
            max_staleness=2,
            max_in_flight=2,
            max_num_gen_batches=3,
            on_limit="keep_unfiltered",
            state=state,
        )

    whole = world()
    groups, _ = whole.sampler.next_batch()
    while whole.sampler.work_ahead():
        if len(whole.sampler.state_dict()["reserve"]) == 3:
            break
    whole.engine.load_weights(None, whole.sampler.version + 1)
    whole.sampler.release(groups)
    state, recorded = json.loads(json.dumps(whole.sampler.state_dict())), len(whole.records)
    resumed = world(state)
    (ours, counts), (theirs, same_counts) = whole.sampler.next_batch(), resumed.sampler.next_batch()
    assert counts.num_unfiltered >= 3 and [g.prompt.uid for g in ours] == [g.prompt.uid for g in theirs]
    assert counts.pack(0) == same_counts.pack(0)
    assert whole.records[recorded:] == resumed.records


def counted(*groups: Group, **values: Any) -> SamplingCounts:
    counts = SamplingCounts(**{"version": 4, "gen_batch_size": 4, "num_needed": 2, **values})
    for group in groups:
        counts.add_generated(group)
    return counts


def rollout(tokens: int, reward: Reward | None = None, **values: Any) -> Rollout:
    line = (1,) * tokens
    return Rollout(line, (-0.5,) * tokens, line, (0,) * tokens, **{"finish_reason": "stop", "reward": reward, **values})


def test_what_came_back_from_the_scorer_is_counted_rollout_by_rollout():
    cut = (Turn(0, 1, num_cut=2), Turn(1, 2, num_cut=1))
    prompt = Prompt("a", (), (1,))
    first = Group(prompt, (rollout(2, Reward(0.5), turns=cut), rollout(3, Reward(2.0, acc=0.0))), 0, 3)
    broken = rollout(1, failure="lost", finish_reason="environment")
    late = rollout(1, failure="timeout", turns=(Turn(0, 1),))
    second = Group(dataclasses.replace(prompt, uid="b"), (broken, late, rollout(4)), 1, 4)
    counts = counted(first, second)
    assert (counts.generated_tokens, counts.num_rollouts, counts.num_scored) == (11, 5, 2)
    assert (counts.num_failed_rewards, counts.failure_rate) == (3, 0.6)
    assert counts.first_failure == "prompt 'b': lost"
    assert (counts.num_played, counts.num_environment_failures, counts.num_cut_observations) == (3, 1, 3)
    values = {name: metric.result() for name, metric in counts.metrics().items()}
    assert values["critic/score_all/mean"] == 1.25
    assert (values["environment/failures"], values["environment/cut_observations"]) == (1, 3)
    assert counted(Group(prompt, (rollout(1),), 0, 0)).first_failure == "prompt 'a': no reason given"
    ended = counted(Group(prompt, (rollout(1, Reward(1.0), finish_reason="environment"),), 0, 0))
    assert (ended.num_environment_failures, ended.num_played, ended.failure_rate) == (0, 0, 0.0)
    assert "environment/failures" not in ended.metrics()


def test_predictions_ages_and_batches_are_averaged_over_what_there_is():
    counts = counted(num_submitted=9)
    for mixed in (0.5, None, 0.25):
        counts.add_prediction(mixed)
    prompt = Prompt("a", (), (1,))
    counts.add_trained([Group(prompt, (), s, version) for s, version in enumerate((1, 4, 4))], num_unfiltered=2)
    values = {name: metric.result() for name, metric in counts.metrics().items()}
    assert values["train/predicted_mixed_ratio"] == 0.375
    assert (values["train/staleness/mean"], values["train/staleness/max"]) == (1.0, 3)
    assert (values["train/groups_trained"], values["train/groups_unfiltered"]) == (3, 2)
    assert [counted(num_submitted=n).num_gen_batches for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    counts.add_trained([])
    assert (counts.staleness_max, counts.num_trained, counts.num_unfiltered) == (0, 0, 0)


def test_counts_come_back_from_a_checkpoint_field_by_field():
    counts = counted()
    for place, field in enumerate(dataclasses.fields(counts)):
        value = getattr(counts, field.name)
        if isinstance(value, int | float):
            setattr(counts, field.name, type(value)(place + 1))
    counts.fates, counts.discarded, counts.first_failure = Counter(kept=3), Counter(surplus=2), "prompt 'a': so"
    back = SamplingCounts.unpack(json.loads(json.dumps(counts.pack(77))))
    assert back == dataclasses.replace(counts, num_skipped=77)
    back.fates["new"] += 1
    assert back.num_generated == 4


def test_what_was_being_scored_at_the_end_of_a_step_is_there_at_the_begin_of_the_next():
    world = World(always_mixed, max_in_flight=5)
    world.step()
    num_steps = world.engine.num_steps
    groups, report = world.step()
    assert [g.submission for g in groups] == [4, 5, 6, 7] and report.num_generated == 5
    assert world.engine.num_steps == num_steps


def test_rewards_collected_at_the_begin_of_a_step_leave_no_earlier_deadline_behind():
    world = World(always_mixed, reward_lag=2, max_in_flight=1, train_batch_size=1, max_staleness=9)
    num_steps = [(world.step(), world.engine.num_steps)[1] for _ in range(4)]
    # Two groups are being scored when the first batch is ready; the fourth group is waited for from its own end on.
    assert num_steps == [3, 3, 3, 6]


def test_a_step_that_carries_nothing_does_not_wait_for_groups_behind_its_last():
    lengths = lambda request, i: 90 if request.submission >= 7 else 1  # noqa: E731
    world = World(mixed_when(lambda p: p % 2 == 0), max_staleness=0, lengths=lengths)
    groups, report = world.step()
    assert [g.submission for g in groups] == [0, 2, 4, 6] and world.engine.num_steps < 10
    assert report.discarded["surplus"] >= 1 and world.engine.num_in_flight == 0


def test_groups_of_others_in_the_engine_are_no_part_of_the_state_and_forbid_a_load():
    world = World(always_mixed, lengths=lambda request, i: 9, max_staleness=1)
    world.sampler.work_ahead()
    foreign = GroupRequest(Prompt("other", (), (1,)), 10**6, 2, 0, PARAMS, seed=0)
    world.engine.submit(foreign)
    state = world.sampler.state_dict()
    assert [r["submission"] for r in state["unfinished"]] == [0, 1, 2, 3]
    busy = World(always_mixed)
    busy.engine.submit(foreign)
    with pytest.raises(RuntimeError, match="nothing in flight"):
        busy.sampler.load_state_dict(state)


def test_a_state_without_the_share_of_its_last_step_knows_none():
    world = World(mixed_when(lambda p: p % 2 == 0), max_staleness=0)
    world.step()
    state = world.sampler.state_dict()
    assert state["last_judged"] == [4, 8]
    del state["last_judged"]
    assert World(always_mixed, max_staleness=0, state=state).sampler.state_dict()["last_judged"] == [0, 0]


def test_groups_that_were_kept_and_not_needed_count_in_the_share_of_the_next_step():
    """Three of the first four are kept, so two more are started for the last place, of which both are kept."""
    world = World(mixed_when(lambda p: p >= 1), max_staleness=0)
    _, report = world.step()
    assert (report.num_submitted, report.discarded["surplus"]) == (6, 1)
    assert world.sampler.state_dict()["last_judged"] == [5, 6]


def test_a_batch_that_is_not_full_holds_the_places_of_a_full_one_while_it_is_trained_on():
    world = World(
        mixed_when(lambda p: p % 4 == 0),
        lengths=lambda request, i: 50 if request.submission >= 8 else 1,
        gen_batch_size=8,
        max_num_gen_batches=1,
        on_limit="train_partial",
        max_staleness=1,
    )
    groups, _ = world.sampler.next_batch()
    assert len(groups) == 2 and world.sampler.work_ahead()
    assert world.engine.num_in_flight == 4  # two batches of four, less the one in training
    world.sampler.release(groups)
    assert world.sampler.work_ahead() and world.engine.num_in_flight == 8
