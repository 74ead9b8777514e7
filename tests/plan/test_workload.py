"""The work of a step as a config describes it: how much is generated, kept, scored and trained."""

from __future__ import annotations

import pytest

from gspo.config import load
from gspo.plan.workload import Workload, workload_of

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = (
    "data.train_batch_size=32",
    "data.gen_batch_size=48",
    f"{A}.ppo_mini_batch_size=8",
    f"{R}.n=4",
    "data.max_prompt_length=100",
    "data.max_response_length=300",
)
FILTER = "algorithm.filter_groups"


def work(*words: str, **given: float) -> Workload:
    return workload_of(load(None, [*SIZES, *words]).config, **given)


def test_sizes_are_those_of_the_config() -> None:
    found = work(f"{A}.ppo_epochs=2", f"{FILTER}.enable=true")
    assert (found.prompts, found.group_size, found.mini_batches, found.epochs) == (32, 4, 4, 2)
    assert (found.mean_prompt, found.longest_prompt, found.lengths.longest) == (100, 100, 300)


def test_groups_are_dropped_only_where_they_are_filtered() -> None:
    filtered, plain = f"{FILTER}.enable=true", f"{FILTER}.enable=false"
    assert work(filtered, keep_rate=0.3).keep_rate == 0.3
    assert work(filtered).keep_rate == 0.5
    assert work(plain).keep_rate == work(plain, keep_rate=0.3).keep_rate == 1.0


@pytest.mark.parametrize(("source", "share"), [("recompute", 1.0), ("rollout", 0.0), ("first_pass", 0.75)])
def test_the_share_of_a_batch_that_is_scored_before_the_update(source: str, share: float) -> None:
    """The first of four mini-batches is scored by its own forward."""
    assert work(f"{A}.old_log_prob_source={source}").score_share == share


def test_lengths_are_given_or_assumed_and_all_the_longest_without_an_end() -> None:
    assert work(mean_response=77.0, spread=0.5).lengths.mean == 77.0
    assert work().lengths.mean == pytest.approx(0.35 * 300)
    assert work(mean_prompt=20.0).mean_prompt == 20.0
    ignoring = work(f"{R}.ignore_eos=true").lengths
    assert (ignoring.mean, ignoring.spread) == (300.0, 0.0)


def test_what_may_be_carried_over_and_run_ahead() -> None:
    stream = (f"{FILTER}.enable=true", f"{FILTER}.strategy=stream", f"{FILTER}.max_staleness=1")
    found = work(*stream)
    assert (found.max_staleness, found.in_flight, found.round_groups, found.eta) == (1, 48, None, 0)
    rounds = work(f"{FILTER}.enable=true", f"{FILTER}.strategy=rounds")
    assert (rounds.max_staleness, rounds.in_flight, rounds.round_groups) == (0, None, 48)
    assert work(f"{R}.mode=async", f"{R}.max_head_offpolicyness=2", f"{FILTER}.max_staleness=2").eta == 2
