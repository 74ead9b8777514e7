"""Requests and what an engine returns for them: stop tokens, limits, and groups that do not fit their request."""

from __future__ import annotations

import dataclasses

import pytest

from gspo.rollout.engine import (
    EngineError,
    GroupRequest,
    SamplingParams,
    check_finished,
    check_generated,
    check_request,
)
from gspo.rollout.progress import as_requests, begin
from gspo.types import Group, Prompt, Rollout


def request(submission: int = 3, n: int = 2, length: int = 4, **params) -> GroupRequest:
    prompt = Prompt(f"p{submission}", (), tuple(range(length)))
    return GroupRequest(prompt, submission, n, 1, SamplingParams(**{"max_tokens": 6, **params}), seed=5)


def rollout(size: int = 3, version: int = 1) -> Rollout:
    return Rollout((7,) * size, (-1.0,) * size, (1,) * size, (version,) * size, "stop", "text")


def group(of: GroupRequest, *rollouts: Rollout) -> Group:
    return Group(of.prompt, rollouts, of.submission, of.version)


def test_stop_tokens_of_a_request_are_added_to_those_of_the_model():
    assert set(SamplingParams(6).stop_tokens([1, 2])) == {1, 2}
    assert set(SamplingParams(6, stop_token_ids=(8, 9)).stop_tokens([1, 2])) == {1, 2, 8, 9}
    assert set(SamplingParams(6, stop_token_ids=(8, 9), ignore_eos=True).stop_tokens([1, 2])) == {8, 9}
    assert SamplingParams(6, ignore_eos=True).stop_tokens([1, 2]) == ()


@pytest.mark.parametrize(
    "good", [{}, {"length": 58}, {"top_p": 1.0}, {"top_p": 1e-9}, {"temperature": 0.0}, {"n": 1}, {"max_tokens": 60}]
)
def test_a_request_within_its_limits_is_accepted(good):
    check_request(request(**good), max_length=64)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"length": 59}, "59 prompt tokens and max_tokens=6"),
        ({"max_tokens": 61}, "4 prompt tokens and max_tokens=61"),
        ({"length": 0}, "no tokens"),
        ({"n": 0}, "n=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_a_request_beyond_its_limits_is_refused_with_its_prompt(bad, message):
    with pytest.raises(ValueError, match="'p3'") as error:
        check_request(request(**bad), max_length=64)
    assert message in str(error.value)


def test_a_group_that_fits_its_request_is_returned_as_it_is():
    asked = request()
    made = group(asked, rollout(), rollout(1))
    assert check_finished(asked, made) is made
    assert check_generated([asked], [made]) == [made]


@pytest.mark.parametrize("part", ["log_probs", "loss_mask", "versions"])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_another_length_than_the_tokens_are_refused(part, size):
    asked = request()
    other = dataclasses.replace(rollout(3), **{part: getattr(rollout(size), part)})
    with pytest.raises(EngineError, match=rf"{size} {part} for 3 tokens in response 1"):
        check_finished(asked, group(asked, rollout(), other))


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_responses_is_refused(count):
    asked = request()
    with pytest.raises(EngineError, match=f"{count} rollouts; expected n=2"):
        check_finished(asked, group(asked, *[rollout()] * count))


def test_groups_of_other_requests_are_refused():
    asked = request()
    for wrong in (request(4), dataclasses.replace(asked, submission=9)):
        with pytest.raises(EngineError, match="not submitted"):
            check_finished(asked, group(wrong, rollout(), rollout()))
    with pytest.raises(EngineError, match="not submitted"):
        check_finished(None, group(asked, rollout(), rollout()))
    with pytest.raises(EngineError, match=r"expected a gspo\.Group"):
        check_finished(asked, "text")
    with pytest.raises(EngineError, match="0 groups for 1 requests"):
        check_generated([asked], [])
    with pytest.raises(EngineError, match="expected a list"):
        check_generated([asked], None)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_log_probs_that_are_not_finite_stop_the_run(bad):
    asked = request()
    broken = dataclasses.replace(rollout(3, version=4), log_probs=(-1.0, bad, -1.0))
    with pytest.raises(FloatingPointError, match=r"'p3'.*response 1.*version 4"):
        check_finished(asked, group(asked, rollout(), broken))


def test_a_continued_response_keeps_its_tokens_with_their_versions():
    asked = request(n=3)
    progress, (first, second, third) = begin(asked, arrival=0)
    begun = second.extended([5, 6], [-0.5, -0.6], version=1)
    first.finish(first.extended([9], [-0.1], version=1), "nine", "stop")
    (saved,) = as_requests([progress], [(second, begun), (third, third.begun)])
    assert [r.finish_reason for r in saved.partial] == ["stop", "aborted"]
    again, rest = begin(saved, arrival=4)
    assert [s.index for s in rest] == [1, 2] and again.finished[0].text == "nine"
    assert rest[0].context == (*asked.prompt.token_ids, 5, 6)
    longer = rest[0].extended([7], [-0.7], version=2)
    assert (longer.token_ids, longer.log_probs) == ((5, 6, 7), (-0.5, -0.6, -0.7))
    assert (longer.versions, longer.loss_mask) == ((1, 1, 2), (1, 1, 1))
    start = rest[0].start()
    # Two of six tokens are there; the last of them is fed first, at position 5, and the sixth is drawn at position 8.
    assert (start.token, start.length, start.first, start.last) == (6, 5, 3, 8)
    assert len({s.start().key for s in (first, second, third)}) == 3
    assert begin(request(4, n=3), 0)[1][1].start().key != start.key == second.start().key


def test_requests_to_continue_come_in_order_of_submission():
    late, early = (begin(request(submission), arrival)[0] for arrival, submission in enumerate((8, 2)))
    assert [r.submission for r in as_requests([late, early], [])] == [2, 8]
