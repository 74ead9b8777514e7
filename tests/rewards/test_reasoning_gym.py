"""reasoning-gym answers: right ones score, and code in them never runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.rewards import RewardError, make_scorer
from gspo.rewards.graders.reasoning_gym import grade_gym
from gspo.types import Group, Prompt, Rollout

pytest.importorskip("reasoning_gym")

from gspo.data.tasks.reasoning_gym import load_reasoning_gym

# These score with eval, with sympy's parse_expr, and by comparing text.
TASKS = ["n_queens", "spiral_matrix", "countdown", "intermediate_integration", "prime_factorization", "chain_sum"]


def test_truths_score_and_code_in_an_answer_never_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attacks = [
        f"__import__('os').system('touch {canary}')",
        f"[__import__('os').system('touch {canary}')]",
        f"open('{canary}', 'w')",
        "9**9**9**9",
    ]
    scorer = make_scorer(num_workers=1, timeout=60.0)
    for number, task in enumerate(TASKS):
        row = load_reasoning_gym("train", limit=1, task=task)[0]
        prompt = Prompt(row.uid, row.messages, (), row.data_source, row.ground_truth, row.extra)
        texts = [row.answer or "", *(f"<answer>{attack}</answer>" for attack in attacks)]
        scorer.submit(Group(prompt, tuple(Rollout((), (), (), (), "stop", text=t) for t in texts), number, 0))
    groups = scorer.collect()
    scorer.close()
    for task, group in zip(TASKS, groups):
        scores = [rollout.reward.score if rollout.reward else rollout.failure for rollout in group.rollouts]
        assert scores[0] == 1.0, (task, scores)
        assert all(isinstance(score, float) and score < 0.2 for score in scores[1:]), (task, scores)
    assert not canary.exists()


def test_a_problem_that_comes_out_differently_is_missing_not_wrong() -> None:
    row = load_reasoning_gym("train", limit=1, task="chain_sum")[0]
    prompt = Prompt(row.uid, row.messages, (), row.data_source, "another truth", row.extra)
    scorer = make_scorer(num_workers=1, timeout=60.0)
    scorer.submit(Group(prompt, (Rollout((), (), (), (), "stop", text=row.answer or ""),), 0, 0))
    rollout = scorer.collect()[0].rollouts[0]
    scorer.close()
    assert rollout.reward is None and "PYTHONHASHSEED=0" in (rollout.failure or "")


def test_answers_are_not_scored_in_the_trainer() -> None:
    row = load_reasoning_gym("train", limit=1, task="chain_sum")[0]
    with pytest.raises(RewardError, match="worker"):
        grade_gym(row.answer or "", row.ground_truth, row.extra)
