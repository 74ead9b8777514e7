"""Responses that are watched: what is reported as they are written, and the best tokens of every position."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gspo.rollout.engine import GroupRequest, Written
from tests.rollout.models import VOCAB, drain, make_engine, make_model, make_request


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def watched(number: int, **values: Any) -> GroupRequest:
    return dataclasses.replace(make_request(number, **{"n": 1, "ignore_eos": True, **values}), watch=True)


def read_all(engine: Any) -> tuple[list[Any], list[Written]]:
    groups, written = [], []
    while engine.num_in_flight:
        groups += engine.step()
        written += engine.written()
    return groups, written


def best(model: Any, context: tuple[int, ...], num: int, temperature: float) -> list[tuple[int, float]]:
    with torch.no_grad():
        scores = (model(torch.tensor([context])).logits[0, -1].float() / temperature).log_softmax(-1)
    values, ids = scores.sort(descending=True)
    return list(zip(ids[:num].tolist(), values[:num].tolist()))


def test_the_best_tokens_of_every_position_are_those_of_the_model(model: Any) -> None:
    """Rows of other temperatures, numbers of tokens and none beside each other; one ends early, so that rows move."""
    requests = [
        watched(0, max_tokens=3, num_top=2),
        watched(1, max_tokens=9, num_top=5, temperature=0.5),
        watched(2, max_tokens=8),
        watched(3, max_tokens=9, num_top=1, temperature=2.0),
    ]
    engine = make_engine(model, decode_chunk=2)
    for request in requests:
        engine.submit(request)
    groups, written = read_all(engine)
    for request in requests:
        (rollout,) = next(g for g in groups if g.submission == request.submission).rollouts
        parts = [w for w in written if w.submission == request.submission]
        assert sum((w.token_ids for w in parts), ()) == rollout.token_ids
        assert sum((w.log_probs for w in parts), ()) == rollout.log_probs
        assert sum((w.versions for w in parts), ()) == rollout.versions
        top = [position for w in parts for position in w.top]
        if not request.params.num_top:
            assert top == []
            continue
        assert len(top) == len(rollout.token_ids)
        for i, found in enumerate(top):
            context = (*request.prompt.token_ids, *rollout.token_ids[:i])
            expected = best(model, context, request.params.num_top, request.params.temperature)
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-4)


def test_a_continued_response_reports_only_what_is_new_with_its_version(model: Any) -> None:
    engine = make_engine(model, decode_chunk=3)
    engine.submit(watched(4, max_tokens=8, num_top=1))
    engine.step()
    first = engine.written()
    assert [w.versions for w in first] == [(0, 0, 0)]
    assert engine.written() == [], "reported once"
    engine.load_weights(None, version=5)
    assert engine.written() == []
    (state,) = engine.unfinished()
    fresh = make_engine(model, decode_chunk=3, version=5)
    fresh.submit(state)
    for each in (engine, fresh):
        (group,), rest = read_all(each)
        tokens = sum((w.token_ids for w in rest), ())
        assert first[0].token_ids + tokens == group.rollouts[0].token_ids
        assert {v for w in rest for v in w.versions} == {5} and sum(len(w.top) for w in rest) == 5


def test_numbers_of_responses_are_those_of_the_whole_group(model: Any) -> None:
    engine = make_engine(model)
    engine.submit(dataclasses.replace(watched(4, max_tokens=2, n=2), first_response=3))
    _, written = read_all(engine)
    assert sorted({w.response for w in written}) == [3, 4]


def test_a_draw_number_decides_the_tokens_instead_of_the_submission(model: Any) -> None:
    request = make_request(4, ignore_eos=True)
    other = dataclasses.replace(request, submission=9)
    (one,), (two,), (same,) = (
        make_engine(model).generate([r]) for r in (request, other, dataclasses.replace(other, draw=4))
    )
    assert same.submission == 9
    tokens = [[r.token_ids for r in group.rollouts] for group in (one, two, same)]
    assert tokens[0] == tokens[2] != tokens[1]


def test_cancelling_one_part_of_a_group_leaves_the_other_and_those_beside_it(model: Any) -> None:
    requests = [dataclasses.replace(make_request(1, n=2, ignore_eos=True), first_response=i) for i in (0, 2)]
    requests += [make_request(i, n=2, ignore_eos=True) for i in (5, 6)]
    alone = {g.submission: g for g in make_engine(model).generate(requests[1:])}
    expected = {number: [r.token_ids for r in group.rollouts] for number, group in alone.items()}
    for num_steps in (0, 1):
        engine = make_engine(model, num_slots=5, decode_chunk=2)
        for request in requests:
            engine.submit(request)
        for _ in range(num_steps):
            engine.step()
        engine.cancel(1, 0)
        assert engine.num_in_flight == 3
        assert {g.submission: [r.token_ids for r in g.rollouts] for g in drain(engine)} == expected


def test_log_probs_that_are_not_finite_name_the_response_in_its_whole_group() -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="response 3"):
        make_engine(model).generate([dataclasses.replace(make_request(4, n=1), first_response=3)])


def test_no_more_best_tokens_are_reported_than_there_are(model: Any) -> None:
    engine = make_engine(model)
    engine.submit(watched(1, max_tokens=1, num_top=20))
    _, written = read_all(engine)
    assert [len(position) for w in written for position in w.top] == [min(20, VOCAB)]
