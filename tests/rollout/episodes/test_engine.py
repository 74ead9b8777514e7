"""Episodes: append-only tokens, closing texts, openings, limits, draws that do not depend on turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from gspo.environments.pool import EpisodePool
from gspo.environments.protocol import ToolCall
from gspo.rollout.engine import EngineError, GroupRequest
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.types import Group
from tests.rollout.episodes.world import ENDS, make_dialogue, make_episodes, make_pool, make_tokenizer, recite
from tests.rollout.models import drain, make_engine, make_model, make_request, plain_log_probs

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    pool = make_pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def opening() -> Iterator[EpisodePool]:
    pool = make_pool("Opening")
    yield pool
    pool.close()


def native(**options: Any) -> Any:
    return make_engine(make_model(), max_length=128, eos_token_ids=ENDS, **options)


def play(engine: Any, requests: list[GroupRequest]) -> list[Group]:
    for request in requests:
        engine.submit(request)
    return sorted(drain(engine), key=lambda group: group.submission)


def test_observations_follow_turns_and_log_probs_are_those_of_the_whole_conversation(pool: EpisodePool) -> None:
    model = make_model()
    groups = play(make_episodes(native(), pool), [make_request(i, n=3, max_tokens=60) for i in range(6)])
    rollouts = [(g.prompt, r) for g in groups for r in g.rollouts]
    assert {len(r.turns) for _, r in rollouts} == {1, 2, 3} or {len(r.turns) for _, r in rollouts} == {2, 3}
    for prompt, rollout in rollouts:
        want = plain_log_probs(model, prompt.token_ids, rollout.token_ids)
        for own, got, expected in zip(rollout.loss_mask, rollout.log_probs, want):
            assert got == pytest.approx(expected, abs=2e-5) if own else got == 0.0
        for turn, following in zip(rollout.turns, rollout.turns[1:]):
            seen = TOKENIZER.decode(rollout.token_ids[turn.end : following.start])
            assert seen == f"\n{turn.observation}\n" and turn.observation.startswith(f"{len(turn.text)}.")
            assert turn.reward == len(turn.text) / 8
        assert rollout.text == rollout.turns[-1].text


def test_siblings_share_a_world_and_groups_do_not(pool: EpisodePool) -> None:
    groups = play(make_episodes(native(), pool), [make_request(i, n=4, max_tokens=60) for i in range(8)])
    worlds = [{t.observation.rpartition(".")[2] for r in g.rollouts for t in r.turns} for g in groups]
    assert all(len(world) == 1 for world in worlds) and len(set.union(*worlds)) > 1


def test_generate_gives_the_tokens_of_step(pool: EpisodePool) -> None:
    requests = [make_request(i, n=2, max_tokens=40) for i in range(4)]
    stepped = play(make_episodes(native(), pool), requests)
    generated = make_episodes(native(), pool).generate(requests)
    assert [[r.token_ids for r in g.rollouts] for g in stepped] == [
        [r.token_ids for r in g.rollouts] for g in generated
    ]
    assert [[r.turns for r in g.rollouts] for g in stepped] == [[r.turns for r in g.rollouts] for g in generated]


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_the_lag_changes_no_token(pool: EpisodePool, lag: int) -> None:
    requests = [make_request(i, n=2, max_tokens=40) for i in range(4)]
    now = play(make_episodes(native(), pool, lag=lag), requests)
    assert [[r.token_ids for r in g.rollouts] for g in now] == [
        [r.token_ids for r in g.rollouts] for g in play(make_episodes(native(), pool), requests)
    ]


def test_an_opening_is_part_of_the_prompt_of_the_group(opening: EpisodePool) -> None:
    requests = [make_request(i, n=2, max_tokens=20) for i in range(3)]
    requests = [
        dataclasses.replace(r, prompt=dataclasses.replace(r.prompt, messages=({"role": "user", "content": "hi"},)))
        for r in requests
    ]
    for group in play(make_episodes(native(), opening, opens=True), requests):
        (message,) = group.prompt.opening
        assert message["content"].startswith("go ") and group.prompt.messages[-1] == message
        assert TOKENIZER.decode(group.prompt.token_ids) == f"hi\n{message['content']}"
    engine = make_episodes(native(), opening, opens=True)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    engine.load_weights(None, 1)
    state = engine.unfinished()
    expected = drain(engine)
    fresh = make_episodes(native(version=1), opening, opens=True)
    for request in state:
        fresh.submit(request)
    assert fresh.unfinished() == state and drain(fresh) == expected


def test_a_response_in_the_middle_of_a_later_turn_keeps_its_turns(pool: EpisodePool) -> None:
    engine = make_episodes(native(), pool)
    for number in range(4):
        engine.submit(make_request(number, n=2, max_tokens=60))

    def is_in_a_later_turn() -> bool:
        parts = [part for request in engine.unfinished() for part in request.partial]
        return any(p.turns and p.loss_mask[-1] and p.turns[-1].end < len(p.token_ids) for p in parts)

    while not is_in_a_later_turn():
        assert engine.num_in_flight
        engine.step()
    engine.load_weights(None, 1)
    state = engine.unfinished()
    fresh = make_episodes(native(version=1), pool)
    for request in state:
        fresh.submit(request)
    assert fresh.unfinished() == state and drain(fresh) == drain(engine)


def test_turns_are_limited(pool: EpisodePool) -> None:
    for limits in ({"max_turns": 2}, {"max_observations": 1}):
        groups = play(make_episodes(native(), pool, **limits), [make_request(i, n=2, max_tokens=90) for i in range(4)])
        rollouts = [r for g in groups for r in g.rollouts]
        assert max(len(r.turns) for r in rollouts) == 2
        assert {r.finish_reason for r in rollouts if len(r.turns) == 2} <= {"turns", "length"}
        assert all(turn.reward is not None for r in rollouts for turn in r.turns)


def test_what_follows_a_closing_text_is_cut() -> None:
    pool = make_pool("Calculating")
    try:
        engine = make_episodes(recite(["so <tool>6*7</tool>41 or", "it is 42"]), pool, tool_format="tag")
        (group,) = play(engine, [make_request(0, n=1, max_tokens=90)])
    finally:
        pool.close()
    (rollout,) = group.rollouts
    assert TOKENIZER.decode(rollout.token_ids) == "so <tool>6*7</tool><result>42</result>it is 42<eos>"
    own = [token for token, mask in zip(rollout.token_ids, rollout.loss_mask) if mask]
    assert TOKENIZER.decode(own) == "so <tool>6*7</tool>it is 42<eos>"
    assert rollout.finish_reason == "stop" and rollout.text == "it is 42"
    assert [(t.num_calls, t.num_errors, t.observation) for t in rollout.turns] == [(1, 0, "42"), (0, 0, "")]


def test_an_observation_that_leaves_no_room_for_an_answer_ends_the_response() -> None:
    pool = make_pool("Calculating")

    def played(max_tokens: int) -> Any:
        engine = make_episodes(recite(["so <tool>6*7</tool>", "it is 42"]), pool, tool_format="tag")
        (group,) = play(engine, [make_request(0, n=1, max_tokens=max_tokens)])
        return group.rollouts[0]

    try:
        first, second = played(90).turns
        full, one_more = played(second.start), played(second.start + 1)
    finally:
        pool.close()
    assert full.finish_reason == "length" and len(full.turns) == 1 and len(full.token_ids) == first.end
    assert len(one_more.turns) == 2


def test_a_stop_that_closes_nothing_goes_on() -> None:
    dialogue = make_dialogue("tag")
    stops = {TOKENIZER.decode([token]) for token in dialogue.stop_token_ids}
    assert stops == {">"}
    ids = TOKENIZER("a > b")["input_ids"][:3]
    assert dialogue.turn_length(ids, was_cut=False) is None
    assert dialogue.turn_length(ids, was_cut=True) == 3
    whole = TOKENIZER("<tool>1</tool>")["input_ids"]
    assert dialogue.turn_length(whole, was_cut=False) == len(whole)
    assert dialogue.action(whole, 0, was_cut=False).tool_calls == (ToolCall("", {"input": "1"}),)


def test_long_observations_are_cut_and_counted() -> None:
    for side, want in (("left", "abcd..."), ("right", "...wxyz"), ("middle", "ab...(truncated)...yz")):
        dialogue = make_dialogue(max_observation=4, truncate_side=side)
        tokens, num_cut = dialogue.observation([{"role": "user", "content": "abcdefuvwxyz"}], 5)
        text = TOKENIZER.decode(tokens)
        assert num_cut == 1 and "(truncated)" in text and want.strip(".") in text
    assert dialogue.observation([{"role": "user", "content": "abcd"}], 5)[1] == 0


def test_an_engine_that_begins_again_is_refused(pool: EpisodePool) -> None:
    class Forgetful(ScriptedEngine):
        def submit(self, request: GroupRequest) -> None:
            super().submit(dataclasses.replace(request, partial=()))

    engine = make_episodes(Forgetful(lambda *_: ScriptedAnswer((5, 6, ENDS[1]))), pool)
    engine.submit(make_request(0, n=1, max_tokens=30))
    with pytest.raises(EngineError, match=r"GroupRequest\.partial"):
        drain(engine)


def test_a_part_of_a_group_draws_what_the_whole_group_would() -> None:
    request = make_request(3, n=4)
    (whole,) = native().generate([request])
    parts = native().generate([dataclasses.replace(request, n=1, first_response=i) for i in range(4)])
    assert [p.rollouts[0].token_ids for p in parts] == [r.token_ids for r in whole.rollouts]


def test_calls_beyond_the_limit_of_a_turn_are_answered_with_an_error_and_not_run() -> None:
    calls = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(4))
    ids = tuple(TOKENIZER(calls)["input_ids"])
    action = make_dialogue("hermes", max_calls=2).action(ids, 0, was_cut=False)
    assert [call.name for call in action.tool_calls] == ["f0", "f1", "f2"]
    assert [call.error for call in action.tool_calls] == [None, None, "at most 2 calls per turn"]
