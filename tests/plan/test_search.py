"""The best split is the best of those that can be tried, and grows with the cluster."""

from __future__ import annotations

import dataclasses

import pytest

from gspo.config import load
from gspo.models.shape import SHAPES
from gspo.plan.constants import DEVICES
from gspo.plan.predict import STALE, predict, search, shard_sizes, smallest_cluster, trainer_counts
from gspo.plan.split import Split
from gspo.plan.workload import workload_of


def test_one_device_does_everything_in_turn(h200, work):
    plan = search(SHAPES["1.5b"], h200, 1, work)
    assert [p.mode for p in plan.found] == ["one pool, sync"]
    assert plan.best is not None
    assert plan.best.step_s == pytest.approx(sum(plan.best.stages.values()))
    assert plan.best.stages["update_weights"] == 0


def test_the_best_split_is_the_best_of_all_tried(h200, work):
    plan = search(SHAPES["1.5b"], h200, 8, work)
    best = next(p for p in plan.found if p.eta)
    others = [
        predict(SHAPES["1.5b"], h200, work, Split(t, 8 - t, True, tp, shard, again))
        for t in range(1, 8)
        for tp in (1, 2, 4)
        if (8 - t) % tp == 0
        for shard in shard_sizes(t)
        for again in (False, True)
    ]
    assert best.step_s == pytest.approx(min(p.step_s for p in others if p is not None))


def test_a_step_at_once_takes_the_slowest_of_its_three(h200, work):
    made = predict(SHAPES["7b"], h200, work, Split(8, 8, True, 1, 8))
    assert made is not None
    train = sum(s for n, s in made.stages.items() if n not in ("gen", "staleness bound"))
    assert made.step_s == pytest.approx(max(made.stages["gen"], train, made.stages["staleness bound"]))
    assert made.step_s == pytest.approx(made.parts.total)


def test_more_devices_are_never_slower(h200, work):
    steps = [search(SHAPES["7b"], h200, n, work).found[0].step_s for n in (8, 16, 32, 64, 128)]
    assert steps == sorted(steps, reverse=True)


def test_a_faster_device_is_never_slower(work):
    steps = [search(SHAPES["7b"], DEVICES[name], 32, work).found[0].step_s for name in ("a100", "h100", "h200", "b200")]
    assert steps == sorted(steps, reverse=True)


def test_more_staleness_is_never_slower_and_longer_responses_are(h200, work):
    steps = [search(SHAPES["7b"], h200, 96, dataclasses.replace(work, eta=eta)).found[0].step_s for eta in (1, 2, 4)]
    assert steps == sorted(steps, reverse=True)
    longer = dataclasses.replace(work, lengths=dataclasses.replace(work.lengths, mean=1400.0, longest=4096))
    assert search(SHAPES["7b"], h200, 96, longer).found[0].step_s > steps[1]


def test_dropped_groups_cost_generation_and_no_training(h200, work):
    split = Split(8, 8, False, 1, 8)
    all_kept = dataclasses.replace(work, eta=0, max_staleness=2, in_flight=64, keeps_cache=True)
    half = dataclasses.replace(all_kept, keep_rate=0.5)
    one, two = (predict(SHAPES["1.5b"], h200, w, split) for w in (all_kept, half))
    assert one is not None and two is not None
    assert two.stages["gen"] == pytest.approx(2 * one.stages["gen"])
    assert two.stages["update_actor"] == one.stages["update_actor"]


def test_a_stream_that_carries_over_does_not_wait_for_replacements(h200, work):
    split = Split(8, 8, False, 1, 8)
    waits = dataclasses.replace(work, eta=0, keep_rate=0.5)
    assert waits.rounds == [64, 32, 16, 8, 4, 2, 1, 0.5]
    rounds = dataclasses.replace(waits, round_groups=64)
    assert rounds.rounds == [64, 64]
    carries = dataclasses.replace(waits, max_staleness=2, in_flight=64)
    times = [predict(SHAPES["1.5b"], h200, w, split) for w in (carries, rounds, waits)]
    gen = [p.stages["gen"] for p in times if p is not None]
    assert len(gen) == 3 and gen == sorted(gen)


def test_the_staleness_bound_can_decide(h200, work):
    long = dataclasses.replace(
        work, eta=1, lengths=dataclasses.replace(work.lengths, mean=200.0, longest=65536, spread=4.0)
    )
    made = predict(SHAPES["1.5b"], h200, long, Split(64, 448, True, 1, 64, checkpointing=True))
    assert made is not None and made.limit == STALE


def test_what_does_not_fit_says_how_many_would_do(work):
    large, small = SHAPES["72b"], DEVICES["h100"]
    assert search(large, small, 1, work).best is None
    enough = smallest_cluster(large, small, work)
    assert enough is not None and search(large, small, enough, work).best is not None
    assert search(large, small, enough // 2, work).best is None


def test_memory_stays_within_the_device(h200, work):
    for made in search(SHAPES["32b"], h200, 64, work).found:
        assert made.trainer_memory.total <= h200.memory
        assert made.rollout_memory.total <= h200.memory


def test_splits_of_a_large_cluster_are_few_and_whole_machines():
    counts = trainer_counts(4096, 8)
    assert len(counts) < 50 and all(c % 8 == 0 and 0 < c < 4096 for c in counts)
    assert trainer_counts(4, 8) == [1, 2, 3]
    assert shard_sizes(24) == [1, 2, 4, 8, 24]


@pytest.mark.parametrize(
    "model, group, response, batch, mini, mean, spread, keep, seen",
    [("0.5b", 16, 512, 64, 16, 269.0, 0.45, 0.675, 5.75), ("smol", 8, 320, 128, 32, 154.0, 0.5, 0.19, 4.23)],
)
def test_real_runs_are_predicted(h200, model, group, response, batch, mini, mean, spread, keep, seen):
    """The runs of docs/performance.md, Real work, with answers of different lengths."""
    keys = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.n": group,
        "actor_rollout_ref.rollout.max_num_seqs": 1024,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "data.train_batch_size": batch,
        "data.max_prompt_length": 512,
        "data.max_response_length": response,
        "algorithm.filter_groups.enable": True,
    }
    config = load(None, [f"{key}={value}" for key, value in keys.items()]).config
    work = workload_of(config, mean_response=mean, spread=spread, mean_prompt=103.0, keep_rate=keep)
    best = search(SHAPES[model], h200, 1, work).best
    assert best is not None and best.rollout.rows == 1024
    assert best.step_s == pytest.approx(seen, rel=0.12)
