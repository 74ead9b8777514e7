"""The pool on pages that hold tokens: any sequence of calls gives the responses that each request has alone."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import pytest

from gspo.rollout.counter_noise import sequence_key
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.types import Group, Prompt, Rollout
from tests.rollout.native import plain_kernels
from tests.rollout.native.token_pages import Alone, World

KINDS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.7})


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gspo.kernels.triton_decode", plain_kernels)


def request(number: int, length: int = 5, n: int = 1, max_tokens: int = 6, **values: Any) -> GroupRequest:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    params = {"ignore_eos": True, **{key: value for key, value in values.items() if key in names}}
    rest = {key: value for key, value in values.items() if key not in names}
    tokens = tuple(2 + (3 * number + i * i) % 11 for i in range(length))
    prompt = Prompt(uid=f"p{number}", messages=(), token_ids=tokens)
    return GroupRequest(prompt, number, n, 0, SamplingParams(max_tokens, **params), seed=7, **rest)


def part(tokens: tuple[int, ...], versions: tuple[int, ...] = (), reason: Any = "aborted") -> Rollout:
    size = len(tokens)
    return Rollout(tokens, (-0.5,) * size, (1,) * size, versions or (0,) * size, reason)


class Play:
    """Random calls on one pool, and what they must have led to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.world = World(
            num_pages=pick((13, 16, 24, 200)),
            num_slots=pick((1, 2, 4, 7)),
            num_ahead=pick((0, 1, 3)),
            prefill_tokens=pick((1, 40, 8192)),
            share_prefixes=pick((False, True)),
        )
        self.version = self.number = 0
        self.drawn_under: dict[tuple[int, int], int] = {}  # by key and position in the response
        self.open: dict[tuple[int, int], GroupRequest] = {}  # by submission and first response
        self.written: dict[tuple[int, int], list[int]] = {}
        self.num_checked = 0
        self._note_versions()

    def _note_versions(self) -> None:
        rows, decode = self.world.rows, self.world.rows.decode

        def decode_and_note() -> None:
            slots = rows.slots
            for row in range(len(self.world.pool.stats.rows)):
                if not slots.done[row]:
                    place = int(slots.key[row]), int(slots.length[row] - slots.first[row])
                    assert place not in self.drawn_under, "a token was drawn twice"
                    self.drawn_under[place] = self.version
            decode()

        rows.decode = decode_and_note

    def submit(self) -> None:
        pick, n = self.random.choice, self.random.choice((1, 1, 2, 3))
        values = dict(pick(KINDS), ignore_eos=pick((True, False)), stop_token_ids=pick(((), (3,))))
        flags = {"hold": pick((False, True)), "watch": pick((False, True))}
        new = request(self.number, pick((1, 2, 16, 17, 33, 50)), n, pick((1, 2, 9, 20)), **values, **flags)
        root = pick((None, 0, 1))
        if root is not None:
            same = request(root, 60).prompt.token_ids[: len(new.prompt.token_ids)]
            new = dataclasses.replace(new, prompt=dataclasses.replace(new.prompt, token_ids=same))
        if self.random.random() < 0.3 and new.params.max_tokens > 2:
            size = self.random.randrange(1, new.params.max_tokens)
            begun = [part(tuple(self.random.randrange(4, 13) for _ in range(size)))]
            begun = [part((), reason="aborted"), *begun] if n > 1 and pick((False, True)) else begun
            new = dataclasses.replace(new, partial=tuple(begun))
        parts = [new]
        if n > 1 and not new.partial and pick((False, True)):
            parts = [dataclasses.replace(new, n=1), dataclasses.replace(new, n=n - 1, first_response=1)]
        for each in parts:
            prompt = dataclasses.replace(each.prompt, uid=f"p{each.submission}.{each.first_response}")
            self._send(dataclasses.replace(each, prompt=prompt))
        self.number += 1

    def _send(self, new: GroupRequest) -> None:
        self.open[new.submission, new.first_response] = new
        self.world.pool.submit(new)

    def advance(self) -> None:
        groups = self.world.pool.advance(self.random.choice((1, 2, 5)), self.version)
        self._note_written()
        assert [g.submission for g in groups] == sorted(g.submission for g in groups)
        for group in groups:
            self._check(group)

    def _note_written(self) -> None:
        for written in self.world.pool.take_written():
            self.written.setdefault((written.submission, written.response), []).extend(written.token_ids)

    def _check(self, group: Group) -> None:
        first = int(group.prompt.uid.split(".")[1])
        asked = self.open.pop((group.submission, first))
        assert len(group.rollouts) == asked.n
        for index, rollout in enumerate(group.rollouts):
            alone = Alone(asked, index)
            begun = asked.partial[index].token_ids if index < len(asked.partial) else ()
            assert rollout.token_ids == tuple(alone.tokens), (asked, index)
            assert rollout.log_probs[len(begun) :] == pytest.approx(alone.log_probs, abs=1e-5)
            assert rollout.finish_reason == ("stop" if alone.stopped else "length")
            assert rollout.text == " ".join(map(str, rollout.token_ids))
            key = self._key(asked, index)
            drawn = [self.drawn_under.pop((key, at)) for at in range(len(begun), len(rollout.token_ids))]
            assert list(rollout.versions[len(begun) :]) == drawn
            if asked.watch:
                said = self.written.pop((group.submission, first + index))
                assert said == list(rollout.token_ids[len(begun) :])
            if asked.hold:
                self._continue_or_release(asked, index, rollout)
            self.num_checked += 1

    @staticmethod
    def _key(asked: GroupRequest, index: int) -> int:
        return sequence_key(asked.seed, asked.submission, asked.first_response + index)

    def _continue_or_release(self, asked: GroupRequest, index: int, rollout: Rollout) -> None:
        key = asked.submission, asked.first_response + index
        size = len(asked.prompt.token_ids) + len(rollout.token_ids)
        if asked.n > 1 or size > 90 or key in self.open or self.random.random() < 0.3:
            return self.world.pool.release(*key)
        cut = self.random.choice((len(rollout.token_ids), max(1, len(rollout.token_ids) - 2)))
        tokens = (*rollout.token_ids[:cut], *(self.random.randrange(4, 13) for _ in range(self.random.choice((0, 3)))))
        self._forget_draws(asked, index)
        params = dataclasses.replace(asked.params, max_tokens=len(tokens) + self.random.choice((1, 7)))
        return self._send(dataclasses.replace(asked, params=params, partial=(part(tokens),)))

    def _forget_draws(self, asked: GroupRequest, index: int) -> None:
        key = self._key(asked, index)
        self.drawn_under = {place: v for place, v in self.drawn_under.items() if place[0] != key}

    def cancel(self) -> None:
        if self.open:
            number, first = self.random.choice(sorted(self.open))
            asked = self.open.pop((number, first))
            self.world.pool.cancel(number, first, self.version)
            self._note_written()
            for index in range(asked.n):
                self.written.pop((number, first + index), None)
                self._forget_draws(asked, index)
                self.world.pool.release(number, first + index)

    def change_weights(self) -> None:
        self.random.choice((self.world.pool.rewind, self.world.pool.close_version))(self.version)
        self.version += 1

    def run(self, num_calls: int) -> None:
        calls = [self.submit] * 3 + [self.advance] * 6 + [self.cancel, self.change_weights]
        for _ in range(num_calls):
            self.random.choice(calls)()
            assert self.world.pool.num_groups >= len(self.open)
        while self.open:
            self.advance()


@pytest.mark.parametrize("seed", range(6))
def test_any_calls_give_the_responses_that_each_request_has_alone(seed: int) -> None:
    play = Play(seed)
    play.run(60)
    assert play.num_checked > 5
    play.world.pool.clear()
    assert play.world.num_used == 0 and play.written == {}


def test_a_row_that_is_done_makes_room_before_anything_is_preempted_or_refused() -> None:
    """The host learns late that a row is done: here the other one needs its pages at that moment."""
    world = World(num_pages=5, num_slots=2)
    long, short = request(0, max_tokens=70), request(1, max_tokens=22)
    progress = [world.pool.submit(each) for each in (long, short)]
    rows = []
    while world.pool.num_groups:
        world.pool.advance(16, 0)
        rows.append(world.pool.stats.rows)
    assert rows[:3] == [((0, 0), (1, 0)), ((0, 0), (1, 0)), ((0, 0),)]
    for each, asked in zip(progress, (long, short)):
        assert each.group().rollouts[0].token_ids == tuple(Alone(asked, 0).tokens)
