"""What a step leaves behind: the metrics of its batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gspo.loop.step_records import TrainedStep, row_weights, speed, step_metrics, trained_details, warn_of_failures
from gspo.metrics import Metric
from gspo.sampling.step_counts import SamplingCounts
from gspo.training.batch.batching import collate
from gspo.training.policy import Update
from gspo.types import Group, Prompt, Reward, Rollout
from tests.training.test_policy import groups


def test_an_answer_the_policy_was_certain_of_counts_in_the_gap_to_the_rollouts():
    """A log-prob of exactly 0 is a value, not a sign that the row was not scored."""
    of = groups(num=1, n=2)
    batch = collate(of)
    old = torch.stack([torch.zeros_like(batch.mask[0]), batch.rollout_log_probs[1] + 0.5]) * batch.mask
    whole = batch.with_old(old).with_advantages(batch.mask, batch.mask)
    metrics = step_metrics(TrainedStep(of, SamplingCounts(0, 1, 1), Update({}, old, whole), {}))
    certain, other = (len(r) for r in batch.response_ids)
    wanted = -(1.0 * certain + 0.5 * other) / (certain + other)  # μ is -1 on every token
    assert metrics["actor/rollout_kl"].result() == pytest.approx(wanted)
    assert metrics["actor/rollout_ratio_seq/max"].result() == pytest.approx(torch.e)


def two_groups() -> list[Group]:
    """Groups of two and of one response, one of them cut, with a KL penalty and a metric of their own."""

    def rollout(size: int, mask: tuple[int, ...], score: float, reason: str, **extra: float) -> Rollout:
        reward = Reward(score, extra=extra, kl_penalty=0.25)
        return Rollout(tuple(range(3, 3 + size)), (-1.0,) * size, mask, (0,) * size, reason, reward=reward)

    first = (rollout(4, (0, 1, 1, 1), 1.0, "length", style=0.5), rollout(2, (1, 1), 0.0, "stop"))
    second = (rollout(1, (1,), 3.0, "stop", style=1.0),)
    return [Group(Prompt("a", (), (1, 2)), first, 5, 0), Group(Prompt("b", (), (1, 2, 3, 4)), second, 9, 0)]


def trained(of: list[Group]) -> TrainedStep:
    batch = collate(of)
    old = torch.full_like(batch.mask, -2.0)
    advantages = torch.tensor([[1.0], [-1.0], [0.5]]) * batch.mask
    whole = batch.with_old(old).with_advantages(advantages, 2 * advantages)
    new = old + torch.tensor([[0.1], [-0.2], [0.3]])
    return TrainedStep(of, SamplingCounts(0, 1, 1), Update({}, new, whole), {"critic/vf_loss": Metric.mean(7.0)})


def test_metrics_of_a_batch_in_numbers():
    got = {name: metric.result() for name, metric in step_metrics(trained(two_groups())).items()}
    wanted = {
        "critic/score/mean": 4 / 3,  # before the KL penalty …
        "critic/score/max": 3.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 4 / 3 - 0.25,  # … and after it
        "critic/advantages/mean": (3 * 1.0 - 2 * 1.0 + 0.5) / 6,  # over trained tokens
        "critic/advantages/min": -1.0,
        "critic/returns/max": 2.0,
        "response_length/mean": 2.0,
        "response_length/max": 3.0,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/mean": 8 / 3,
        "prompt_length/min": 2.0,
        "reward/style/mean": 0.75,  # over the rewards that have it
        "actor/rollout_kl": 1.0,  # log μ - log π_old = -1 - (-2)
        "actor/rollout_ratio_token/max": math.exp(-1),
        "actor/rollout_ratio_seq/min": math.exp(-1),
        "critic/vf_loss": 7.0,
    }
    assert {name: got[name] for name in wanted} == pytest.approx(wanted)
    assert not any("rollout_" in name for name in step_metrics(trained(two_groups()), with_gap=False))


def test_details_of_each_response_belong_to_its_own_row():
    done = trained(two_groups())
    got = trained_details(done.groups, done.update, lambda token: f"<{token}>")
    assert list(got) == [5, 9]
    rows = [*got[5], *got[9]]
    assert [r["advantage"] for r in rows] == pytest.approx([1.0, -1.0, 0.5])
    assert [r["ratio"] for r in rows] == pytest.approx([math.exp(0.1), math.exp(-0.2), math.exp(0.3)])
    assert [r["tokens"] for r in rows] == [["<3>", "<4>", "<5>", "<6>"], ["<3>", "<4>"], ["<3>"]]
    assert [r["loss_mask"] for r in rows] == [[0, 1, 1, 1], [1, 1], [1]]
    assert [len(r["new_log_probs"]) for r in rows] == [4, 2, 1]
    assert (rows[1]["log_probs"], rows[1]["old_log_probs"]) == ([-1.0] * 2, [-2.0] * 2)
    assert rows[1]["new_log_probs"] == pytest.approx([-2.2] * 2)


def test_branches_add_tokens_and_no_further_responses():
    """The first response has a branch of two tokens with an advantage and a context of its own."""
    of = two_groups()
    first, second = of[0].rollouts
    branch = Rollout((7, 7), (-3.0, -3.0), (1, 1), (0, 0), "stop", context=(1,) * 9)
    cut = dataclasses.replace(first, branches=(branch,))
    of[0] = of[0].with_rollouts((cut, second))
    batch = collate(of)
    assert batch.num_sequences == 4 and batch.num_rollouts == 3
    old = torch.full_like(batch.mask, -2.0)
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [9.0]]) * batch.mask
    update = Update({}, old + advantages, batch.with_old(old).with_advantages(advantages, advantages))
    metrics = step_metrics(TrainedStep(of, SamplingCounts(0, 1, 1), update, {}))
    got = {name: metric.result() for name, metric in metrics.items()}
    assert got["critic/score/mean"] == pytest.approx(4 / 3)
    assert got["critic/rewards/mean"] == pytest.approx(4 / 3 - 0.25)
    assert got["response_length/mean"] == 2.0 and got["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert got["critic/advantages/max"] == 9.0 and got["prompt_length/max"] == 9.0
    assert got["actor/rollout_kl"] == pytest.approx((6 * 1.0 - 2 * 1.0) / 8)
    details = trained_details(of, update, str)
    assert [[r["advantage"] for r in details[number]] for number in (5, 9)] == [[1.0, -1.0], [0.5]]
    assert [r["ratio"] for r in details[5]] == pytest.approx([math.e, 1 / math.e])


def test_weights_of_groups_are_spread_over_their_rows():
    assert row_weights(two_groups(), None) is None
    assert row_weights(two_groups(), (2.0, 3.0)).tolist() == [2.0, 2.0, 3.0]


def test_speed_is_tokens_over_the_whole_step_and_over_generation():
    values = {"train/generated_tokens": 50.0, "timing_s/step": 4.0, "timing_s/gen": 2.0}
    assert speed(values, overlapped=False) == {"perf/throughput": 12.5, "perf/rollout_throughput": 25.0}
    assert speed(values, overlapped=True) == {"perf/throughput": 12.5}
    assert speed(values | {"timing_s/step": 0.0}, overlapped=False) == {}
    assert speed({"timing_s/step": 4.0}, overlapped=False) == {}
    nothing = {"train/generated_tokens": 0.0, "train/tokens": 60.0}  # a step that lives on groups of earlier ones
    assert speed(values | nothing, overlapped=True) == {"perf/throughput": 0.0}
    assert speed(values | {"timing_s/gen": 0.0}, overlapped=False) == {"perf/throughput": 12.5}
    supervised = {"train/tokens": 60.0, "timing_s/step": 5.0, "timing_s/testing": 2.0}
    assert speed(supervised, overlapped=False) == {"perf/throughput": 20.0}  # the time of evaluations does not count
    assert speed(supervised | {"timing_s/testing": 5.0}, overlapped=False) == {}
    assert speed(values | {"timing_s/testing": 2.0}, overlapped=True) == {"perf/throughput": 12.5}


def test_log_probs_are_rounded_and_masked_tokens_count_in_no_mean():
    of = two_groups()
    batch = collate(of)
    new = torch.full_like(batch.mask, -1.0)
    old, advantages = new.clone(), 1.0 * batch.mask
    old[0, 0], new[0, 1], advantages[0, 0] = -9.0, -0.123456789, 50.0  # the first token of the first row is masked
    update = Update({}, new, batch.with_old(old).with_advantages(advantages, advantages))
    row = trained_details(of, update, str)[5][0]
    assert row["advantage"] == 1.0 and row["ratio"] == pytest.approx(math.exp((1 - 0.123456789) / 3))
    assert row["new_log_probs"][:2] == [-1.0, -0.12346] and row["old_log_probs"][0] == -9.0


def test_a_batch_in_which_nothing_is_trained_has_no_ratios():
    of = two_groups()
    batch = collate(of)
    nothing = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    whole = nothing.with_old(batch.mask - 2.0).with_advantages(batch.mask, batch.mask)
    metrics = step_metrics(TrainedStep(of, SamplingCounts(0, 1, 1), Update({}, batch.mask, whole), {}))
    assert metrics["actor/rollout_kl"].result() == 0.0
    assert not any("rollout_ratio" in name or "advantages" in name for name in metrics)


def test_failures_are_said_with_their_number_and_the_first():
    counts = SamplingCounts(0, 1, 1, num_rollouts=8, num_failed_rewards=2, first_failure="prompt 'a': no")
    said = []
    warn_of_failures(3, counts, said.append)
    warn_of_failures(4, SamplingCounts(0, 1, 1, num_rollouts=8), said.append)
    assert said == ["step 3: 2 of 8 rewards failed and are missing; the first: prompt 'a': no"]
