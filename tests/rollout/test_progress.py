"""What is known of a response in flight: its number, its order, its random numbers, and the request that continues it."""

from __future__ import annotations

import dataclasses

from gspo.rollout.counter_noise import sequence_key
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.progress import SequenceProgress, as_requests, begin
from gspo.types import Prompt, Rollout


def request(submission: int = 3, n: int = 2, **values) -> GroupRequest:
    return GroupRequest(
        Prompt("p", (), (4, 5, 6)), submission, n, 1, SamplingParams(max_tokens=6), **{"seed": 5, **values}
    )


def part(*tokens: int, reason="aborted") -> Rollout:
    return Rollout(tokens, (-1.0,) * len(tokens), (1,) * len(tokens), (1,) * len(tokens), reason, "said")


def begun(of: GroupRequest, arrival: int = 0) -> list[SequenceProgress]:
    return begin(of, arrival)[1]


def test_responses_of_a_part_of_a_group_have_the_numbers_and_keys_of_the_whole():
    whole, rest = begun(request(n=4)), begun(request(n=2, first_response=2))
    assert [s.number for s in whole] == [0, 1, 2, 3] and [s.number for s in rest] == [2, 3]
    assert [s.index for s in rest] == [0, 1]
    assert [s.key for s in whole] == [sequence_key(5, 3, i) for i in range(4)]
    assert [s.key for s in rest] == [s.key for s in whole[2:]]


def test_a_draw_number_replaces_the_submission_in_the_keys_even_when_it_is_0():
    assert [s.key for s in begun(request(draw=9))] == [s.key for s in begun(request(9))]
    assert [s.key for s in begun(request(draw=0))] == [s.key for s in begun(request(0))]
    assert [s.order for s in begun(request(draw=9))] == [s.order for s in begun(request())]
    assert begun(request(seed=6))[0].key != begun(request())[0].key


def test_fresh_responses_of_a_submission_share_a_prefix_and_continued_ones_do_not():
    mixed = begun(request(n=3, partial=(part(7), part(), part(8))))
    assert [s.prefix_key for s in mixed] == [(3, 0), (3, -1), (3, 2)]
    assert [s.prefix_key for s in begun(request(n=1, first_response=2, partial=(part(7),)))] == [(3, 2)]
    assert begun(request(4))[0].prefix_key != mixed[1].prefix_key
    assert [s.num_cached for s in mixed] == [3, 2, 3]


def test_the_order_is_by_submission_then_response_then_arrival():
    later = begun(request(2, n=2), arrival=9) + begun(request(2, n=1, first_response=1), arrival=3)
    rows = [*begun(request(5, n=1), arrival=0), *later]
    assert [s.order for s in sorted(rows, key=lambda s: s.order)] == [(2, 0, 9), (2, 1, 3), (2, 1, 9), (5, 0, 0)]


def test_a_slot_starts_with_the_last_token_and_ends_at_max_tokens_of_the_whole_response():
    (fresh,) = begun(request(n=1))
    (continued,) = begun(request(n=1, partial=(part(7, 8),)))
    starts = [fresh.start(), continued.start()]
    assert [(s.token, s.length, s.first, s.last) for s in starts] == [(6, 2, 2, 7), (8, 4, 2, 7)]
    group, (with_stops,) = begin(request(n=1), 0, (1, 2))
    assert with_stops.start().stops == group.stops == (1, 2) and fresh.start().stops == ()


def test_a_continued_response_has_reported_what_it_began_with():
    assert [s.num_reported for s in begun(request(n=3, partial=(part(7, 8), part())))] == [2, 0, 0]


def test_a_continuing_request_keeps_everything_but_its_parts_and_ends_with_the_last_begun_one():
    asked = dataclasses.replace(request(n=4, first_response=2, draw=7, watch=True, hold=True), partial=(part(1),))
    group, (first, second, third, fourth) = begin(asked, 0)
    third.finish(part(9), "nine", "length")
    (saved,) = as_requests([group], [(first, part(1, 2)), (second, second.begun), (fourth, fourth.begun)])
    assert dataclasses.replace(saved, partial=asked.partial) == asked
    assert [(p.token_ids, p.finish_reason) for p in saved.partial] == [
        ((1, 2), "aborted"),
        ((), "aborted"),
        ((9,), "length"),
    ]
    assert not group.is_complete
    for sequence in (first, second, fourth):
        sequence.finish(part(3), "three", "stop")
    assert group.is_complete
    assert [r.text for r in group.group().rollouts] == ["three", "three", "nine", "three"]
    assert (group.group().submission, group.group().version, group.group().prompt) == (3, 1, asked.prompt)
    assert as_requests([begin(request(), 0)[0]], [])[0].partial == ()


def test_parts_of_two_groups_with_one_submission_are_not_mixed():
    halves = [begin(request(n=1, first_response=i), arrival=i) for i in range(2)]
    rows = [(sequences[0], part(10 + i)) for i, (_, sequences) in enumerate(halves)]
    saved = as_requests([group for group, _ in halves], rows)
    assert [(r.first_response, r.partial[0].token_ids) for r in saved] == [(0, (10,)), (1, (11,))]
