"""What a reward function may return: numbers, dicts and Rewards become a Reward; everything else is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gspo.rewards.protocol import RewardError
from gspo.rewards.results import as_reward, from_json, to_json
from gspo.types import Reward


class Unreadable:
    def item(self):
        raise TypeError


READ = [
    (1, Reward(1.0)),
    (True, Reward(1.0)),
    (np.float32(0.5), Reward(0.5)),
    (torch.tensor(2.0), Reward(2.0)),
    ({"score": 0.5}, Reward(0.5, None)),  # without `acc` there is none: it is neither 0 nor the score
    ({"score": 0.5, "acc": None}, Reward(0.5, None)),
    ({"score": 0.5, "acc": 0}, Reward(0.5, 0.0)),
    ({"score": 0.5, "acc": True, "style": 2, "note": "text", "none": None, "list": [1]}, Reward(0.5, 1.0, {"style": 2.0})),
    (Reward(0.5, extra={"x": 1}), Reward(0.5, None, {"x": 1.0})),
    (Reward(1, noise=0.25, notes={"why": "short", 3: [1]}), Reward(1.0, noise=0.25, notes={"why": "short", "3": "[1]"})),
    ({"score": np.int64(2), "b": b"text", "t": (1,), "m": {"a": 1}, "on": True, 3: 4}, Reward(2.0, None, {"on": 1.0, "3": 4.0})),
]  # fmt: skip
REFUSED = [
    (float("nan"), "the score is nan, expected a finite number"),
    (float("inf"), "the score is inf, expected a finite number"),
    ({"score": 1.0, "acc": float("-inf")}, "acc is -inf"),
    ({"score": 1.0, "x": float("nan")}, "the metric 'x' is nan"),
    (10**400, "too large for a float"),
    ("1", "expected a number"),
    (None, "expected a number"),
    ([1.0], "expected a number"),
    (np.ones(2), "expected one number"),
    (torch.ones(2), "expected one number"),
    (Unreadable(), "expected one number"),
    ("x" * 198, f"the score is '{'x' * 198}' (str), expected a number"),
    ("x" * 199, f"the score is '{'x' * 199}… (str), expected a number"),
    ({"score": 1.0, "x": torch.ones(2)}, "the metric 'x' is tensor([1., 1.]), expected one number"),
    ({"acc": 1.0}, 'expected "score" among them'),
]


@pytest.mark.parametrize(("value", "wanted"), READ)
def test_a_result_is_read(value, wanted):
    got = as_reward(value)
    assert got == wanted
    assert from_json(json.loads(json.dumps(to_json(got)))) == wanted  # as a worker sends it


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_other_results_are_refused(value, message):
    with pytest.raises(RewardError) as caught:
        as_reward(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "item",
    [
        None,
        1,
        [],
        {},
        {"score": "1"},
        {"score": None},
        {"score": 1.0, "extra": 3},
        {"score": 1.0, "acc": "x"},
        {"score": 1.0, "notes": "x"},
        {"score": 1.0, "noise": "x"},
    ],
)
def test_a_worker_that_answers_something_else_is_a_failure(item):
    assert isinstance(from_json(item), str)


def test_a_failure_stays_a_failure():
    assert from_json(to_json("it broke")) == "it broke"


def test_an_answer_of_a_worker_may_leave_out_what_is_empty():
    assert from_json({"score": 1}) == Reward(1.0)
    assert from_json({"score": 1, "acc": 0, "extra": {"x": 2}}) == Reward(1.0, 0.0, {"x": 2.0})
    assert from_json({"failure": 3, "score": 2}) == Reward(2.0)
    assert from_json({"score": "1"}) == (
        "a reward worker's answer was refused: the score is '1' (str), expected a number"
    )
    assert from_json([1]) == "a reward worker answered [1], expected a score"
    assert to_json(Reward(1.0, 0.5, {"x": 2.0})) == {"score": 1.0, "acc": 0.5, "extra": {"x": 2.0}}
