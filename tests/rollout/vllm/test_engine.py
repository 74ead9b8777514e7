"""What the vLLM engine asks of vLLM, call by call, and what it makes of the answers. vLLM itself is replaced."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gspo.rollout.counter_noise import uniform
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.token_sampling import RowSampling, choose
from gspo.rollout.vllm import engine as vllm_engine
from gspo.rollout.vllm.core import Piece
from gspo.rollout.vllm.engine import VllmEngine
from gspo.rollout.vllm.settings import VllmSettings
from gspo.types import Rollout
from tests.rollout.native.test_pool_on_pages import KINDS, part, request
from tests.rollout.native.token_pages import EOS, MAX_LENGTH, Alone, logits_of


class Core:
    """Draws one token per request and step, as the real one; a request is gone once it ended or was taken out."""

    def __init__(self, settings: VllmSettings) -> None:
        self.running: dict[str, tuple[list[int], SamplingParams, int, int, Sequence[int]]] = {}
        self.calls: list[Any] = []
        self.is_asleep = False
        self.log_prob: float | None = None  # given for every token, where it is set

    def add(
        self, name: str, token_ids: Sequence[int], params: SamplingParams, key: int, position: int, stops: Sequence[int]
    ) -> None:
        assert not self.is_asleep and name not in self.running
        self.running[name] = list(token_ids), params, key, position, stops
        self.calls.append(("add", tuple(token_ids), position))

    def abort(self, names: Sequence[str]) -> None:
        assert not self.is_asleep
        for name in names:
            del self.running[name]

    def step(self) -> list[Piece]:
        assert not self.is_asleep
        pieces = []
        for name, (tokens, params, key, position, stops) in list(self.running.items()):
            draw = uniform(torch.tensor([key]), torch.tensor([position]))
            token, log_prob = choose(logits_of(tokens)[None], RowSampling.of([params]), draw)
            tokens.append(int(token))
            self.running[name] = tokens, params, key, position + 1, stops
            reason = "stop" if int(token) in stops else "length" if position + 1 == params.max_tokens else None
            if reason is not None:
                del self.running[name]
            given = float(log_prob) if self.log_prob is None else self.log_prob
            pieces.append(Piece(name, [int(token)], [given], reason))
        return pieces

    def load(self, weights: Any) -> None:
        assert not self.running and not self.is_asleep, "caches of the old weights"
        self.calls.append(("load", weights))

    def sleep(self) -> None:
        assert not self.running
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "VllmCore", Core)


def make(chunk: int = 3, **settings: Any) -> tuple[VllmEngine, Any]:
    engine = VllmEngine(
        VllmSettings("model", 4, MAX_LENGTH, **settings),
        lambda ids: " ".join(map(str, ids)),
        eos_token_ids=(EOS,),
        decode_chunk=chunk,
    )
    return engine, engine._core


def alone(asked: GroupRequest) -> list[tuple[int, ...]]:
    return [tuple(Alone(asked, index).tokens) for index in range(asked.n)]


def check(asked: GroupRequest, rollouts: Sequence[Rollout]) -> None:
    for index, rollout in enumerate(rollouts):
        drawn = Alone(asked, index)
        num_begun = len(asked.partial[index].token_ids) if index < len(asked.partial) else 0
        assert rollout.token_ids == tuple(drawn.tokens) and rollout.text == " ".join(map(str, drawn.tokens))
        assert rollout.log_probs[num_begun:] == pytest.approx(drawn.log_probs, abs=1e-5)
        assert rollout.finish_reason == ("stop" if drawn.stopped else "length")
        assert len(rollout.versions) == len(rollout.loss_mask) == len(rollout.token_ids)


@pytest.mark.parametrize("seed", range(3))
def test_any_calls_give_the_responses_that_each_request_has_alone(seed: int) -> None:
    """Groups run, rest, are cancelled, continued after a resume, and change weights, beside evaluations."""
    pick = random.Random(seed)
    engine, core = make(chunk=pick.choice((1, 4)), sleep=True)
    opened: dict[int, GroupRequest] = {}
    written: dict[tuple[int, int], list[int]] = {}
    version, num_checked = 0, 0

    def step() -> None:
        nonlocal num_checked
        groups = engine.step()
        assert [g.submission for g in groups] == sorted(g.submission for g in groups)
        for each in engine.written():
            assert set(each.versions) == {version}
            written.setdefault((each.submission, each.response), []).extend(each.token_ids)
        for group in groups:
            asked = opened.pop(group.submission)
            check(asked, group.rollouts)
            for index, rollout in enumerate(group.rollouts):
                said, begun = written.get((group.submission, index), []), asked.partial[index : index + 1]
                num_begun = len(begun[0].token_ids) if begun else 0
                assert tuple(said) == (rollout.token_ids[num_begun:] if asked.watch else ())
                num_checked += 1
        assert engine.num_in_flight == len(opened)

    for number in range(40):
        action = pick.choice(("submit", "submit", "step", "step", "weights", "rest", "cancel", "generate"))
        if action == "submit":
            params = dict(pick.choice(KINDS), ignore_eos=pick.choice((True, False)), watch=pick.choice((True, False)))
            new = request(number, pick.choice((1, 9)), pick.choice((1, 2)), pick.choice((1, 5, 12)), **params)
            if pick.random() < 0.3 and new.params.max_tokens > 3:
                new = dataclasses.replace(new, partial=(part((5, 6, 7)),))
            opened[number] = new
            engine.submit(new)
        elif action == "weights":
            version += 1
            engine.load_weights({} if pick.random() < 0.5 else None, version)
        elif action == "rest":
            engine.rest()
            assert core.is_asleep
        elif action == "cancel" and opened:
            gone = pick.choice(sorted(opened))
            del opened[gone]
            engine.cancel(gone, 0)
        elif action == "generate":
            asked = [request(1000 + number + i, 4, 2, 4) for i in range(2)]
            for each, group in zip(asked, engine.generate(asked), strict=True):
                check(each, group.rollouts)
        else:
            step()
    while opened:
        step()
    assert num_checked > 3 and core.running == {}


def test_responses_in_flight_go_on_under_new_weights_in_the_order_of_a_fresh_engine() -> None:
    engine, core = make(chunk=2)
    asked = [request(number, 3, max_tokens=6) for number in (4, 2)]
    for each in asked:
        engine.submit(each)
    engine.step()
    core.calls.clear()
    engine.load_weights({"w": 1}, version=7)
    first = [(*each.prompt.token_ids, *alone(each)[0][:2]) for each in reversed(asked)]
    assert core.calls == [("load", {"w": 1}), *(("add", tokens, 2) for tokens in first)]
    state = engine.unfinished()
    assert [(r.submission, r.partial[0].versions) for r in state] == [(2, (0, 0)), (4, (0, 0))]
    groups = [group for _ in range(2) for group in engine.step()]
    assert [group.rollouts[0].versions for group in groups] == [(0, 0, 7, 7, 7, 7)] * 2
    assert [group.submission for group in groups] == [2, 4]
    core.calls.clear()
    engine.load_weights(None, version=8)
    assert core.calls == []


def test_groups_in_flight_wait_for_an_evaluation_and_keep_their_tokens() -> None:
    engine, core = make(chunk=2)
    asked = request(0, 3, max_tokens=6)
    engine.submit(asked)
    engine.step()
    core.calls.clear()
    assert engine.generate([]) == [] and core.calls == []
    evaluation = [request(number, 3, max_tokens=2) for number in (9, 8)]
    assert [group.submission for group in engine.generate(evaluation)] == [9, 8], "in the order of the requests"
    assert core.calls[-1] == ("add", (*asked.prompt.token_ids, *alone(asked)[0][:2]), 2)
    assert engine.num_in_flight == 1
    (group,) = [group for _ in range(2) for group in engine.step()]
    check(asked, group.rollouts)


def test_a_finished_group_of_a_resumed_run_needs_no_vllm_and_a_cleared_engine_has_none() -> None:
    engine, core = make()
    done = part((5, 6), reason="stop")
    engine.submit(request(3, partial=(done,)))
    assert core.calls == [] and engine.step()[0].rollouts == (done,)
    engine.submit(request(4))
    engine.clear()
    assert (engine.num_in_flight, core.running, engine.step()) == (0, {}, [])
    engine.close()
    assert core.calls[-1] == "close"


@pytest.mark.parametrize("bad", [1.0, float("nan"), float("-inf")])
def test_log_probs_that_are_not_finite_name_the_response_in_its_whole_group(bad: float) -> None:
    engine, core = make()
    core.log_prob = bad
    engine.submit(request(4, first_response=3))
    with pytest.raises(FloatingPointError, match=r"prompt 'p4' \(submission 4, response 3\)"):
        engine.step()


def test_an_engine_that_does_not_sleep_rests_as_it_is() -> None:
    engine, core = make()
    engine.submit(request(1))
    engine.rest()
    assert not core.is_asleep and len(core.running) == 1
    sleeper, slept = make(sleep=True)
    sleeper.submit(request(1, max_tokens=2))
    sleeper.rest()
    sleeper.rest()
    sleeper.submit(request(2, max_tokens=2))
    sleeper.cancel(1, 0)
    assert slept.is_asleep and slept.running == {}
    assert [group.submission for group in sleeper.step()] == [2] and not slept.is_asleep


def test_requests_that_cannot_run_are_refused() -> None:
    engine, core = make()
    too_long = request(1, 100, max_tokens=MAX_LENGTH - 99)
    for ask in (lambda: engine.submit(too_long), lambda: engine.generate([request(0), too_long])):
        with pytest.raises(ValueError, match="prompt 'p1'"):
            ask()
    assert core.calls == [] and engine.num_in_flight == 0
