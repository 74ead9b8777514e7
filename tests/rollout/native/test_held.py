"""Caches held over turns: the same tokens as without, whatever memory there is, and no page is left behind."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from gspo.environments.pool import EpisodePool
from gspo.rollout.engine import GroupRequest
from gspo.types import Group
from tests.rollout.episodes.world import ENDS, make_episodes, make_pool
from tests.rollout.models import CONFIGS, drain, make_model, make_request
from tests.rollout.native import plain_kernels
from tests.rollout.native.test_paged import all_pages_are_free, paged_engine


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "gspo.kernels.triton_decode", plain_kernels)


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    pool = make_pool(num_turns=5)
    yield pool
    pool.close()


def paged(model: Any, *, holds: bool = True, **options: Any) -> Any:
    engine = paged_engine(model, max_length=128, eos_token_ids=ENDS, **options)
    if not holds:
        submit, generate = engine.submit, engine.generate
        engine.submit = lambda request: submit(dataclasses.replace(request, hold=False))
        engine.generate = lambda requests: generate([dataclasses.replace(r, hold=False) for r in requests])
    return engine


def play(engine: Any, requests: list[GroupRequest]) -> list[Group]:
    for request in requests:
        engine.submit(request)
    return sorted(drain(engine), key=lambda group: group.submission)


def tokens_of(groups: list[Group]) -> list[tuple[int, ...]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


QUICK = ("llama", "qwen2-sliding")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in sorted(set(CONFIGS) - {"gpt2"})]
)
def test_tokens_are_those_of_an_engine_that_computes_them_again(pool: EpisodePool, kind: str) -> None:
    model = make_model(kind)
    requests = [make_request(i, n=3, max_tokens=70, length=10 + 7 * i) for i in range(4)]
    held, again = (paged(model, holds=holds, num_slots=6) for holds in (True, False))
    groups, expected = (play(make_episodes(engine, pool), requests) for engine in (held, again))
    assert tokens_of(groups) == tokens_of(expected)
    for group, other in zip(groups, expected):
        for mine, theirs in zip(group.rollouts, other.rollouts):
            assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
    assert max(len(rollout.turns) for group in groups for rollout in group.rollouts) >= 2
    assert held.stats.num_continued == again.stats.num_continued and again.stats.num_reused == 0
    assert held.metrics()["rollout/prefix_saved"].value > 0.6
    assert all_pages_are_free(held) and all_pages_are_free(again)


def test_an_evaluation_holds_caches_from_turn_to_turn(pool: EpisodePool) -> None:
    model = make_model()
    requests = [make_request(i, n=2, max_tokens=70) for i in range(4)]
    engine = paged(model, num_slots=8)
    assert tokens_of(make_episodes(engine, pool).generate(requests)) == tokens_of(
        make_episodes(paged(model, holds=False, num_slots=8), pool).generate(requests)
    )
    assert engine.metrics()["rollout/prefix_saved"].value > 0.6
    assert all_pages_are_free(engine)


def test_held_pages_make_room_under_pressure(pool: EpisodePool) -> None:
    model = make_model()
    requests = [make_request(i, n=3, max_tokens=80, length=20 + 9 * i) for i in range(4)]
    expected = tokens_of(play(make_episodes(paged(model, holds=False, num_slots=8), pool), requests))
    for num_pages in (12, 24):
        engine = paged(model, num_slots=8, num_pages=num_pages)
        assert tokens_of(play(make_episodes(engine, pool), requests)) == expected, num_pages
        assert all_pages_are_free(engine)


def test_new_weights_forget_what_is_held(pool: EpisodePool) -> None:
    model = make_model()
    requests = [make_request(i, n=2, max_tokens=70) for i in range(4)]
    engine = make_episodes(paged(model, num_slots=8), pool)
    for request in requests:
        engine.submit(request)
    while not any(len(r.turns) > 1 for request in engine.unfinished() for r in request.partial):
        engine.step()
    engine.load_weights(None, 1)
    state = engine.unfinished()
    finished = drain(engine)
    fresh = make_episodes(paged(model, num_slots=8, version=1), pool)
    for request in state:
        fresh.submit(request)
    assert drain(fresh) == finished


def test_a_turn_that_was_cut_goes_on_from_the_part_that_is_left() -> None:
    model = make_model()
    engine = paged(model, num_slots=2)
    request = dataclasses.replace(make_request(0, n=1, max_tokens=90, length=30), hold=True)
    (group,) = play(engine, [request])
    (rollout,) = group.rollouts
    assert len(rollout.token_ids) > 1
    for keep in (len(rollout.token_ids) - 1, 1):
        begun = dataclasses.replace(
            rollout,
            token_ids=(*rollout.token_ids[:keep], 7, 8, 9),
            log_probs=(*rollout.log_probs[:keep], 0.0, 0.0, 0.0),
            loss_mask=(*rollout.loss_mask[:keep], 0, 0, 0),
            versions=(*rollout.versions[:keep], 0, 0, 0),
            finish_reason="aborted",
        )
        follow = dataclasses.replace(request, partial=(begun,))
        before, expected = engine.stats.num_reused, tokens_of(play(paged(model, holds=False, num_slots=2), [follow]))
        assert tokens_of(play(engine, [follow])) == expected
        assert engine.stats.num_reused == before + 30 + keep
        engine.submit(request)  # the same response again, to be held
        drain(engine)
    engine.release(0, 0)
    assert all_pages_are_free(engine)


def test_a_prompt_that_begins_like_an_earlier_one_starts_from_its_pages() -> None:
    model = make_model()
    first = make_request(0, n=1, max_tokens=20, length=70, temperature=0.0)
    (before,) = play(paged(model, num_slots=2), [first])
    said = (*first.prompt.token_ids, *before.rollouts[0].token_ids)

    def later(number: int, token_ids: tuple[int, ...]) -> GroupRequest:
        request = make_request(number, n=1, max_tokens=20, temperature=0.0)
        return dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, token_ids=token_ids), hold=True)

    asked = [
        later(1, (*said, 7, 8, 9)),  # the next turn of a chat
        later(2, (*first.prompt.token_ids[:50], 11, 12)),  # another end
        later(3, (5, *said)),  # another beginning
        later(4, said[:40]),  # a part of it
    ]
    wanted = tokens_of([play(paged(model, num_slots=2), [request])[0] for request in asked])
    engine = paged(model, num_slots=2, share_prefixes=True)
    play(engine, [dataclasses.replace(first, hold=True)])
    assert tokens_of([group for request in asked for group in play(engine, [request])]) == wanted
    assert engine.stats.num_reused >= 64 + 48 + 32
    engine.clear()
    assert all_pages_are_free(engine)
