"""Drawing prompts: what is skipped, what is learned from a group, weights, and the state of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gspo.data.cursor import PromptCursor
from gspo.sampling.prompt_draw import PromptDraw
from gspo.sampling.prompt_ledger import PromptLedger, mixed_probability
from gspo.sampling.settings import SamplingSettings
from gspo.types import Group, Prompt, Reward, Rollout
from tests.sampling.world import PARAMS, make_prompts


def make(prompts: int = 4, epochs: int | None = None, **settings: Any) -> PromptDraw:
    values = {"train_batch_size": 4, "n": 3, "params": PARAMS, "predict": "skip", **settings}
    source = PromptCursor(make_prompts(prompts), seed=0, shuffle=False, total_epochs=epochs)
    return PromptDraw(source, SamplingSettings(**values), seed=5)


def scored(uid: str, *rewards: Reward | None) -> Group:
    rollouts = tuple(Rollout((1,), (-0.5,), (1,), (0,), "stop", reward=r) for r in rewards)
    return Group(Prompt(uid, (), (1,)), rollouts, submission=0, version=0)


def uid_of(prompt: Prompt | None) -> str:
    assert prompt is not None
    return prompt.uid


def test_a_group_is_counted_by_its_right_and_wrong_rewards_and_predicted_before():
    draw = make(predict_discount=0.5)
    assert draw.learn(scored("p1", Reward(-1.0, acc=1.0), Reward(1.0, acc=0.0), None, Reward(1.0))) is None
    assert draw.state_dict()["ledger"] == {"p1": [2.0, 1.0]}
    assert draw.learn(scored("p1", Reward(0.0))) == mixed_probability(1 + 2, 1 + 1, 3)
    assert draw.state_dict()["ledger"] == {"p1": [1.0, 1.5]}


def test_without_prediction_nothing_is_learned_skipped_or_weighted():
    draw = make(predict="off", predict_min_prob=0.01)
    for _ in range(30):
        assert draw.learn(scored("p0", Reward(1.0), Reward(1.0), Reward(1.0))) is None
    assert [uid_of(draw.next(s)) for s in range(6)] == ["p0", "p1", "p2", "p3", "p0", "p1"]
    state = draw.state_dict()
    assert (draw.num_skipped, draw.weight(0), state["ledger"], state["num_drawn"]) == (0, 1.0, {}, 6)


def test_prompts_are_drawn_skipped_and_weighted_as_the_ledger_says():
    draw = make(epochs=12, predict_min_prob=0.3)
    reference = PromptLedger(group_size=3, seed=5, min_prob=0.3, discount=0.9)
    for uid, right in (("p0", 3), ("p1", 0), ("p2", 2)):
        for _ in range(4):
            draw.learn(scored(uid, *(Reward(float(i < right)) for i in range(3))))
            reference.observe(uid, right, 3 - right)
    chances = {f"p{i}": reference.submit_probability(f"p{i}") for i in range(4)}
    assert 0.3 <= chances["p0"] < 1 and chances["p2"] == chances["p3"] == 1
    order = [f"p{i}" for _ in range(12) for i in range(4)]
    expected = [uid for number, uid in enumerate(order, 1) if reference.admits(chances[uid], number)]
    got = []
    while (prompt := draw.next(100 + len(got))) is not None:
        got.append(prompt.uid)
    assert got == expected and draw.num_skipped == 48 - len(expected) > 0
    assert [draw.weight(100 + i) for i in range(len(got))] == [1 / chances[uid] for uid in got]
    doubted = {str(100 + i): chances[uid] for i, uid in enumerate(got) if chances[uid] < 1}
    assert draw.state_dict()["probabilities"] == doubted, "only those below 1 are remembered"
    first = int(next(iter(doubted)))
    draw.forget(first)
    draw.forget(10**6)
    assert draw.weight(first) == 1.0 and len(draw.state_dict()["probabilities"]) == len(doubted) - 1


@pytest.mark.parametrize("stop", [0, 3, 7])
def test_a_resumed_draw_goes_on_with_the_same_prompts_and_weights(stop):
    def fresh() -> PromptDraw:
        return make(predict_min_prob=0.2)

    whole, first = fresh(), fresh()
    for draw in (whole, first):
        for uid in ("p0", "p2"):
            draw.learn(scored(uid, Reward(1.0), Reward(1.0), Reward(1.0)))
    expected = [uid_of(whole.next(s)) for s in range(20)]
    got = [uid_of(first.next(s)) for s in range(stop)]
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [uid_of(resumed.next(s)) for s in range(stop, 20)]
    assert got == expected
    assert [resumed.weight(s) for s in range(20)] == [whole.weight(s) for s in range(20)]
    assert resumed.state_dict() == whole.state_dict()


def test_prompts_put_back_come_first_and_are_found_by_uid():
    draw = make()
    first = draw.next(0)
    assert first is not None and draw.find("p2").token_ids == (2,)
    draw.put_back(first)
    assert [uid_of(draw.next(s)) for s in (1, 2)] == ["p0", "p1"]
    assert draw.epoch_size == 4
