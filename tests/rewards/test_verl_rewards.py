"""Rewards as verl has them: functions of whole lists, and reward managers in place of a function."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.rewards.functions import Response, wrap_function
from gspo.rewards.protocol import RewardError
from gspo.rewards.scoring import make_scorer
from gspo.types import Group, Prompt, Rollout

PROMPT = Prompt("file.jsonl:7", ({"role": "user", "content": "2+3?"},), (11, 12), "sums", "5", {"level": 3})
RESPONSES = [Response("5", (1, 2), 0), Response("six", (3,), 1), Response("", (), 2)]


def of_lists(data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[dict]):
    assert data_sources == ["sums"] * len(solution_strs)
    levels = [info["level"] for info in extra_infos]
    return [
        {"score": level * float(s == t), "acc": s == t} for s, t, level in zip(solution_strs, ground_truths, levels)
    ]


class Manager:
    """What verl's reward managers have in common: a tokenizer, a number to print, and a function of one answer."""

    def __init__(self, compute_score: Any, overlong_buffer_cfg: Any = None) -> None:
        self.tokenizer, self.num_examine = object(), 1
        self.compute_score, self.overlong_buffer_cfg = compute_score, overlong_buffer_cfg

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        raise AssertionError("needs verl's own batches")


def of_one(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 2.0 * (solution_str == ground_truth)


def scores(reward: Any) -> list[float]:
    rollouts = tuple(Rollout(r.token_ids, (0.0,) * len(r.token_ids), (1,) * len(r.token_ids), (), "stop", text=str(r))
                     for r in RESPONSES)  # fmt: skip
    scorer = make_scorer(reward, manager="batch", num_workers=1)
    try:
        scorer.submit(Group(PROMPT, rollouts, submission=0, version=0))
        (group,) = scorer.collect()
        return [r.reward.score for r in group.rollouts if r.reward is not None]
    finally:
        scorer.close()


def test_a_function_of_lists_gets_a_group_at_once():
    function = wrap_function(of_lists)
    assert function.style == "verl_batch"
    assert [r.score for r in function.grade(PROMPT, RESPONSES)] == [3.0, 0.0, 0.0]


def test_a_function_of_lists_scores_in_a_run_with_the_manager_batch():
    assert scores(of_lists) == [3.0, 0.0, 0.0]


@pytest.mark.parametrize(("compute_score", "want"), [(of_one, [2.0, 0.0, 0.0]), (of_lists, [3.0, 0.0, 0.0])])
def test_a_reward_manager_scores_by_its_own_function(compute_score, want):
    assert scores(Manager(compute_score)) == want


def test_what_a_manager_would_add_to_its_function_is_refused():
    with pytest.raises(RewardError, match=r"Manager\.overlong_buffer_cfg has no effect.*reward_manager=dapo"):
        wrap_function(Manager(of_one, overlong_buffer_cfg={"enable": True}))
