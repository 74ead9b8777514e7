"""What the errors of sampling say: counts, reasons and the remedy that the counts suggest."""

from __future__ import annotations

from collections import Counter

import pytest

from gspo.sampling import errors
from gspo.sampling.step_counts import SamplingCounts

HARDER, EASIER, OTHER = "use harder prompts", "use easier prompts", "use prompts of other difficulty"


def report(**values) -> SamplingCounts:
    return SamplingCounts(**{"version": 3, "gen_batch_size": 4, "num_needed": 6, **values})


@pytest.mark.parametrize(
    ("right", "wrong", "remedy"),
    [(1, 0, HARDER), (3, 1, HARDER), (2, 1, OTHER), (1, 1, OTHER), (0, 0, OTHER), (1, 2, OTHER), (1, 3, EASIER)],
)
def test_the_remedy_follows_a_share_of_more_than_two_to_one(right, wrong, remedy):
    fates = {"all_right": right, "all_wrong": wrong, "same_score": 7}
    limit = errors.generation_limit(report(fates=Counter(fates)), 2)
    assert [remedy in str(error) for error in (errors.starved(report(), fates, "why"), limit)] == [True, True]
    assert sum(each in str(limit) for each in (HARDER, EASIER, OTHER)) == 1


@pytest.mark.parametrize(
    ("fates", "reason", "counts"),
    [
        ({"all_wrong": 3}, "all_wrong", "3 all_wrong."),
        ({"same_score": 1, "all_right": 2}, "no_mixed_groups", "2 all_right, 1 same_score."),
        ({}, "no_mixed_groups", "none judged."),
    ],
)
def test_a_starved_sampler_names_its_reason_and_its_counts(fates, reason, counts):
    counted = report()
    error = errors.starved(counted, fates, "a full pass kept nothing")
    assert (error.reason, error.report) == (reason, counted)
    assert str(error).startswith(f"sampling is starved ({reason}): a full pass kept nothing, ")
    assert f"kept: {counts} Remedies" in str(error)


def test_the_limit_names_what_was_judged_and_what_is_needed():
    counted = report(num_submitted=9, fates=Counter(kept=1, all_wrong=2, filtered=5))
    error = errors.generation_limit(counted, 3)
    assert str(error).startswith("num_gen_batches=3 >= max_num_gen_batches=3. Generated too many batches. ")
    assert (
        "Seen: 8 groups judged in this step: 1 kept, 0 all_right, 2 all_wrong, 0 same_score, 0 reward_failed, "
        "5 filtered; 6 kept groups are needed." in str(error)
    )
    assert isinstance(error, ValueError) and error.report is counted
    assert "filtered" not in report(fates=Counter(kept=1)).seen()


def test_failed_rewards_and_the_end_of_the_data_are_counted():
    counted = report(num_rollouts=8, num_failed_rewards=3, first_failure="prompt 'a': timeout")
    failures = errors.reward_failures(counted, 0.25)
    assert str(failures).startswith(
        "3 of 8 rewards of this step failed (38%), above reward.max_failure_rate=0.25. "
        "First failure: prompt 'a': timeout."
    )
    end = errors.data_exhausted(counted, 2)
    assert (end.num_leftover, end.report, failures.report) == (2, counted, counted)
    assert "2 kept groups are left and a batch needs 6." in str(end)
