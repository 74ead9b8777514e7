"""The pool on pages that hold tokens: any sequence of calls gives the responses that each request has alone."""

from __future__ import annotations

import dataclasses
import random
import sys
from itertools import groupby
from typing import Any

import pytest

from gspo.rollout.counter_noise import sequence_key
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.native import runner
from gspo.rollout.native.slot_pool import CacheFull
from gspo.types import Group, Prompt, Rollout
from tests.rollout.native import plain_kernels
from tests.rollout.native.token_pages import Alone, World, logits_of

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


def finish(world: World, *requests: GroupRequest, num_steps: int = 4) -> list[Rollout]:
    """Run these alone to their ends."""
    progress = [world.pool.submit(each) for each in requests]
    while world.pool.num_groups:
        world.pool.advance(num_steps, 0)
    return [rollout for each in progress for rollout in each.group().rollouts]


def follow(asked: GroupRequest, *tokens: int, **changes: Any) -> GroupRequest:
    """The request that continues a held response with these tokens."""
    params = dataclasses.replace(asked.params, max_tokens=len(tokens) + 4)
    return dataclasses.replace(asked, params=params, partial=(part(tokens),), **changes)


def tokens_alone(asked: GroupRequest) -> list[tuple[int, ...]]:
    return [tuple(Alone(asked, index).tokens) for index in range(asked.n)]


def test_a_moved_row_keeps_its_own_length_and_end() -> None:
    """The short row ends first, and the long one takes its place with more pages to come."""
    world = World(num_slots=3)
    asked = [request(0, 1, max_tokens=3), request(1, 50, max_tokens=60), request(2, 2, max_tokens=100)]
    assert [rollout.token_ids for rollout in finish(world, *asked)] == [t for each in asked for t in tokens_alone(each)]
    assert world.num_used == 0


def test_pages_are_reserved_for_the_tokens_that_come_and_no_more() -> None:
    world = World(num_pages=9, num_slots=1)
    world.pool.submit(request(0, 15, max_tokens=34))  # the cache will have 15 + 34 - 1 = 48 tokens at most
    used = []
    while world.pool.num_groups:
        world.pool.advance(2, 0)
        used.append(world.num_used)
    assert used[:3] == [1, 2, 2] and max(used) == 3 and used[-1] == 0
    assert used.index(3) == 9, "the 33rd token is fed in the tenth span"


def test_a_sequence_may_use_every_page() -> None:
    world = World(num_pages=8, num_slots=1)
    asked = request(0, 5, max_tokens=115)
    assert finish(world, asked)[0].token_ids == tokens_alone(asked)[0]


def test_rows_are_placed_while_each_finds_a_page_and_one_to_grow() -> None:
    world = World(num_pages=7, num_slots=4)
    world.pool.submit(request(0, 5, n=4, max_tokens=3))
    world.pool.advance(1, 0)
    assert len(world.pool.stats.rows) == 3, "seven pages, of which the prompt has one while it is shared"
    world = World(num_pages=6, num_slots=4)
    world.pool.submit(request(0, 5, n=4, max_tokens=3))
    world.pool.advance(1, 0)
    assert len(world.pool.stats.rows) == 2


def test_the_share_of_rows_that_end_is_estimated_since_the_caches_were_forgotten() -> None:
    world = World(num_slots=2)
    assert world.pool.ended_per_token == 1 / 128
    for number, max_tokens in ((0, 3), (1, 3), (2, 9)):
        world.pool.submit(request(number, max_tokens=max_tokens))
    world.pool.advance(3, 0)
    assert world.pool.ended_per_token == 1 / (6 + 128)
    world.pool.advance(1, 0)  # both are known to have ended now
    assert world.pool.ended_per_token == 3 / (8 + 128)
    world.pool.rewind(0)
    assert world.pool.ended_per_token == 1 / 128


def test_a_prompt_is_prefilled_once_also_when_a_begun_response_waits_between_its_group() -> None:
    world = World(num_slots=1)
    asked = request(0, n=3, max_tokens=4, partial=(part(()), part((5, 6))))
    assert [r.token_ids for r in finish(world, asked)] == tokens_alone(asked)
    assert world.pool.stats.num_contexts == 2
    prompt = asked.prompt.token_ids
    assert sorted(context for contexts in world.pages.prefills for context in contexts) == [prompt[:-1], (*prompt, 5)]


def test_contexts_are_prefilled_for_free_slots_and_a_few_more() -> None:
    world = World(num_slots=2, num_ahead=1)
    world.pool.submit(request(0, max_tokens=30))
    world.pool.advance(1, 0)
    for number in range(1, 6):
        world.pool.submit(request(number, max_tokens=30))
    world.pool.advance(1, 0)
    assert [len(contexts) for contexts in world.pages.prefills] == [1, 2]
    assert (world.pool.num_responses, len(world.pool.stats.rows)) == (6, 2)


@pytest.mark.parametrize(
    ("packs", "lengths", "forwards"),
    [
        (True, (5, 5, 5), [2, 1]),  # 4 tokens each: two make 8
        (True, (5, 6, 4), [1, 2]),
        (True, (3, 6, 2), [3]),
        (False, (3, 5, 5), [2, 1]),  # two of up to 4 tokens
        (False, (3, 6, 5), [1, 1, 1]),
        (True, (30, 3), [1, 1]),  # one that is longer runs alone
    ],
)
def test_a_prefill_has_as_many_contexts_as_its_tokens_allow(
    packs: bool, lengths: tuple[int, ...], forwards: list[int]
) -> None:
    world = World(num_slots=4, prefill_tokens=8)
    world.rows.packs_prefill = packs
    for number, length in enumerate(lengths):
        world.pool.submit(request(number, length))
    world.pool.advance(1, 0)
    assert [len(contexts) for contexts in world.pages.prefills] == forwards
    assert (world.pool.stats.num_prefills, world.pool.stats.num_contexts) == (len(forwards), len(lengths))


def test_cancelling_frees_what_was_prefilled_for_nobody_else() -> None:
    world = World(num_slots=1, num_ahead=4)
    world.pool.submit(request(0, max_tokens=20))
    two = request(1, 20, max_tokens=3)
    for first in (0, 1):
        world.pool.submit(dataclasses.replace(two, first_response=first))
    world.pool.submit(request(2, 20, max_tokens=3))
    world.pool.advance(1, 0)
    assert [len(contexts) for contexts in world.pages.prefills] == [3] and world.num_used == 1 + 2 + 2
    world.pool.cancel(1, 0, 0)
    assert world.num_used == 5, "the other part of the group waits for it"
    world.pool.cancel(1, 1, 0)
    assert world.num_used == 3
    world.pool.cancel(0, 0, 0)
    assert world.num_used == 2 and world.pool.num_groups == 1
    (group,) = [group for _ in range(3) for group in world.pool.advance(2, 0)]
    assert group.rollouts[0].token_ids == tokens_alone(request(2, 20, max_tokens=3))[0]
    assert len(world.pages.prefills) == 1 and world.num_used == 0


def test_rows_that_move_into_a_cancelled_ones_place_report_their_own_tokens() -> None:
    world = World(num_slots=2)
    long, short = request(0, 50, max_tokens=9), request(1, 2, max_tokens=9, watch=True)
    for each in (long, short):
        world.pool.submit(each)
    world.pool.advance(2, 0)
    world.pool.cancel(0, 0, 0)
    while world.pool.num_groups:
        world.pool.advance(2, 0)
    said = [token for written in world.pool.take_written() for token in written.token_ids]
    assert tuple(said) == tokens_alone(short)[0]


def test_new_weights_prefill_waiting_contexts_again_and_running_rows_keep_theirs_if_asked_to() -> None:
    world = World(num_slots=1, num_ahead=1)
    for number in range(2):
        world.pool.submit(request(number, 20, max_tokens=6))
    world.pool.advance(2, 0)
    assert world.num_used == 2 + 2 and world.pool.holds_cache
    world.pool.close_version(0)
    assert world.num_used == 2 and len(world.pool.stats.rows) == 1
    while world.pool.num_groups:
        world.pool.advance(2, 1)
    assert [len(contexts) for contexts in world.pages.prefills] == [2, 1] and not world.pool.holds_cache


def test_after_new_weights_responses_are_placed_as_in_a_fresh_pool() -> None:
    world, fresh = World(num_slots=2), World(num_slots=2)
    for number in (5, 3, 4):
        world.pool.submit(request(number, n=1, max_tokens=9))
    world.pool.advance(2, 0)
    assert world.pool.stats.rows == ((5, 0), (3, 0))
    world.pool.rewind(0)
    for each in world.pool.unfinished(0):
        fresh.pool.submit(each)
    for each in (world, fresh):
        each.pool.advance(2, 1)
    assert world.pool.stats.rows == fresh.pool.stats.rows == ((3, 0), (4, 0))


def test_rewinding_frees_caches_that_are_held_or_prefilled_ahead() -> None:
    world = World(num_slots=1, num_ahead=1)
    finish(world, request(0, 20, hold=True))
    assert world.pool.holds_cache and world.num_used == 2
    world.pool.rewind(0)
    assert not world.pool.holds_cache and world.num_used == 0
    for number in (1, 2):
        world.pool.submit(request(number, 20, max_tokens=2))
    world.pool.advance(2, 0)
    world.pool.cancel(1, 0, 0)
    assert world.pool.stats.rows == () and world.pool.holds_cache, "the context of the other one"


class TestHeldCaches:
    def test_a_part_of_a_group_continues_its_own_response(self) -> None:
        world = World()
        asked = request(0, 20, n=2, max_tokens=6, hold=True, first_response=3)
        held = finish(world, asked)
        for index, rollout in enumerate(held):
            one = dataclasses.replace(asked, n=1, first_response=3 + index)
            after = follow(one, *rollout.token_ids, 7, 8)
            assert finish(world, after)[0].token_ids == tokens_alone(after)[0]
        stats = world.pool.stats
        assert stats.num_continued == 2 * (20 + 8 - 1) and stats.num_reused == 2 * (20 + 5)
        assert [len(new) for (new,) in world.pages.extensions] == [2, 2], "the last token drawn, and one of the new two"
        for index in (3, 4):
            world.pool.release(0, index)
        assert world.num_used == 0

    def test_a_context_without_the_whole_prompt_is_prefilled_and_leaves_the_shared_prompt_alone(self) -> None:
        world = World()
        asked = request(0, 20, n=2, max_tokens=6, hold=True)
        first, second = finish(world, asked)
        changed = (*asked.prompt.token_ids[:17], 12, 12, 12)
        other = dataclasses.replace(asked, n=1, prompt=dataclasses.replace(asked.prompt, token_ids=changed))
        after = follow(other, *first.token_ids, hold=False)
        assert finish(world, after)[0].token_ids == tokens_alone(after)[0]
        assert world.pool.stats.num_reused == 0 and world.num_used == 2, "the other one's alone"
        beside = follow(dataclasses.replace(asked, n=1, first_response=1), *second.token_ids, 9)
        assert finish(world, beside)[0].token_ids == tokens_alone(beside)[0]
        assert world.pool.stats.num_reused == 20 + 5

    @pytest.mark.parametrize("keep", [0, 1, 3])
    def test_a_response_that_was_cut_continues_from_the_tokens_that_are_left(self, keep: int) -> None:
        world = World()
        asked = request(0, 20, max_tokens=6, hold=True)
        (rollout,) = finish(world, asked)
        other = 12 if rollout.token_ids[keep] != 12 else 11
        after = follow(asked, *rollout.token_ids[:keep], other, 11)
        assert finish(world, after)[0].token_ids == tokens_alone(after)[0]
        stats = world.pool.stats
        assert (stats.num_reused, stats.num_continued) == (20 + keep, 20 + keep + 1)

    def test_a_response_that_is_written_again_is_held_once(self) -> None:
        world = World()
        for _ in range(2):
            finish(world, request(0, 20, max_tokens=6, hold=True))
        assert world.num_used == 2
        world.pool.release(0, 0)
        assert world.num_used == 0

    def test_they_make_room_for_a_context_that_does_not_fit(self) -> None:
        world = World(num_pages=6, num_slots=1)
        finish(world, request(0, 20, max_tokens=3, hold=True))
        asked = request(1, 60, max_tokens=10)
        assert finish(world, asked)[0].token_ids == tokens_alone(asked)[0] and world.num_used == 0

    def test_short_additions_to_long_contexts_are_computed_together(self) -> None:
        world = World(prefill_tokens=45)
        asked = [request(number, 20, max_tokens=3, hold=True) for number in range(3)]
        rollouts = finish(world, *asked)
        assert [len(contexts) for contexts in world.pages.prefills] == [2, 1]
        finish(world, *[follow(each, *rollout.token_ids, 9) for each, rollout in zip(asked, rollouts)])
        assert [len(new) for new in world.pages.extensions] == [3] and len(world.pages.prefills) == 2

    def test_the_oldest_is_freed_first_and_before_contexts_that_were_prefilled_ahead(self) -> None:
        world = World(num_pages=10, num_slots=1, num_ahead=1)
        first, second = (request(number, 20, max_tokens=3, hold=True) for number in (0, 1))
        rollouts = [finish(world, each)[0] for each in (first, second)]
        assert world.num_used == 4
        for each in (request(2, 3, max_tokens=90), request(3, 3, max_tokens=2)):
            world.pool.submit(each)
        while world.pool.num_groups == 2:
            world.pool.advance(4, 0)
        assert [len(contexts) for contexts in world.pages.prefills] == [1, 1, 2], "nothing was prefilled again"
        while world.pool.num_groups:
            world.pool.advance(4, 0)
        reused = []
        for each, rollout in zip((second, first), reversed(rollouts)):
            before = world.pool.stats.num_reused
            finish(world, follow(each, *rollout.token_ids, 9))
            reused.append(world.pool.stats.num_reused - before)
        assert reused == [22, 0]

    def test_the_longest_shared_beginning_of_another_prompt_is_used_in_whole_pages(self) -> None:
        world = World(share_prefixes=True)
        base = request(0, 60, max_tokens=3, hold=True)
        finish(world, dataclasses.replace(base, submission=7, prompt=prompt_of(base, 40, 12)))
        finish(world, base)
        finish(world, dataclasses.replace(base, submission=8, prompt=prompt_of(base, 45, 11)))
        for number, size, reused in ((1, 60, 48), (2, 33, 32), (3, 32, 0), (4, 55, 48)):
            before = world.pool.stats.num_reused
            tokens = base.prompt.token_ids[:size]
            asked = dataclasses.replace(
                base, submission=number, prompt=dataclasses.replace(base.prompt, token_ids=tokens)
            )
            assert finish(world, asked)[0].token_ids == tokens_alone(asked)[0]
            assert world.pool.stats.num_reused - before == reused, number
        stats, copied = world.pool.stats, (60, 60, 60, 33, 55)
        assert stats.num_continued == sum(size - 1 for size in copied) >= stats.num_reused, "the last token is decoded"

    @pytest.mark.parametrize(
        ("length", "shared", "is_copied"),
        [
            (100, 40, False),  # less than half, and 60 tokens more
            (79, 40, True),  # more than half
            (80, 40, True),
            (75, 36, True),  # less than half, but few tokens more
            (90, 31, False),  # too short
            (60, 31, False),
            (60, 32, True),
        ],
    )
    def test_a_shared_beginning_is_copied_where_that_costs_less_than_a_prefill(
        self, length: int, shared: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "MAX_EXTENSION", 40)
        world = World(share_prefixes=True)
        base = request(0, length + 1, max_tokens=3, hold=True)
        finish(world, dataclasses.replace(base, submission=7, prompt=prompt_of(base, shared, 12)))
        finish(world, dataclasses.replace(base, submission=8, prompt=prompt_of(base, 0, 12)))
        asked = dataclasses.replace(base, prompt=prompt_of(base, length + 1, 0))
        assert asked.prompt.token_ids[shared] != 12
        assert finish(world, asked)[0].token_ids == tokens_alone(asked)[0]
        assert [len(new) for (new,) in world.pages.extensions] == ([length - shared // 16 * 16] if is_copied else [])
        assert world.pool.stats.num_reused == (shared // 16 * 16 if is_copied else 0)


def prompt_of(base: GroupRequest, size: int, token: int) -> Prompt:
    """The prompt of a request up to `size`, and then another token until its end."""
    kept = base.prompt.token_ids[:size]
    return dataclasses.replace(base.prompt, token_ids=(*kept, *[token] * (len(base.prompt.token_ids) - size)))


def test_contexts_prefilled_ahead_make_room_before_rows_do_and_preempted_rows_come_first_again() -> None:
    world = World(num_pages=9, num_slots=2, num_ahead=1)
    asked = [request(0, 3, max_tokens=70), request(1, 10, max_tokens=70), request(2, 3, max_tokens=70)]
    progress = [world.pool.submit(each) for each in asked]
    world.pool.advance(1, 0)
    assert world.pool.stats.rows == ((0, 0), (1, 0)) and world.num_used == 3
    seen = [world.pool.stats.rows]
    while world.pool.num_groups:
        world.pool.advance(1, 0)
        seen.append(world.pool.stats.rows)
    # The second row needs its fifth page in step 56 and gets that of the waiting context, the first one in step 63.
    assert seen[:63] == [((0, 0), (1, 0))] * 62 + [((0, 0),)]
    assert [rows for rows, _ in groupby(seen)][2:] == [(), ((1, 0), (2, 0)), ((2, 0),), ()]
    assert [len(contexts) for contexts in world.pages.prefills] == [3, 1, 1]
    assert (world.pool.stats.num_prefills, world.pool.stats.num_contexts) == (3, 5)
    assert [each.group().rollouts[0].token_ids for each in progress] == [tokens_alone(each)[0] for each in asked]


def test_what_was_prefilled_for_others_makes_room_for_the_first_in_the_queue() -> None:
    """Another pool on the same pages has taken almost all of them."""
    world = World(num_pages=11, num_slots=1, num_ahead=2)
    asked = [request(0, 3, max_tokens=1), request(1, 20, max_tokens=4), request(2, 20, max_tokens=4)]
    progress = [world.pool.submit(each) for each in asked]
    world.pool.advance(1, 0)
    assert world.num_used == 1 + 2 + 2
    taken = world.pages.allocator.allocate(6)
    while world.pool.num_groups > 1:
        world.pool.advance(2, 0)
    assert [len(contexts) for contexts in world.pages.prefills] == [3], "the first in the queue kept its context"
    world.pages.allocator.release(taken)
    while world.pool.num_groups:
        world.pool.advance(2, 0)
    assert [len(contexts) for contexts in world.pages.prefills] == [3, 1]
    assert [each.group().rollouts[0].token_ids for each in progress] == [tokens_alone(each)[0] for each in asked]


def test_a_pool_that_holds_nothing_else_says_which_prompt_does_not_fit() -> None:
    world = World(num_pages=10, num_slots=1, num_ahead=1)
    for each in (request(0, 3, max_tokens=1), request(1, 20, max_tokens=4)):
        world.pool.submit(each)
    world.pool.advance(1, 0)
    world.pages.allocator.allocate(world.pages.allocator.num_free)
    with pytest.raises(CacheFull, match="prompt 'p1' and its response do not fit"):
        for _ in range(3):
            world.pool.advance(1, 0)
    assert not world.pool.stats.rows and world.pool.num_groups == 1


def test_the_best_tokens_are_reported_also_where_all_rows_are_drawn_alike() -> None:
    world = World(num_slots=2)
    asked = [request(number, 3, max_tokens=5, num_top=2, watch=True) for number in range(2)]
    for each in asked:
        world.pool.submit(each)
    found: dict[int, list[Any]] = {0: [], 1: []}
    while world.pool.num_groups:
        world.pool.advance(2, 0)
        for written in world.pool.take_written():
            found[written.submission] += written.top
    for each in asked:
        (tokens,) = tokens_alone(each)
        for position, best in enumerate(found[each.submission]):
            scores = logits_of((*each.prompt.token_ids, *tokens[:position])).log_softmax(-1)
            assert [value for _, value in best] == pytest.approx(scores.topk(2).values.tolist(), abs=1e-5)
            assert all(scores[token].item() == pytest.approx(value, abs=1e-5) for token, value in best)
        assert len(found[each.submission]) == 5
