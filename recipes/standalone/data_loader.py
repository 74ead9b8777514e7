"""Look at the built-in datasets and try their rewards: `python data_loader.py`. Exits 1 when a reward is wrong."""

from __future__ import annotations

import sys

import checkout  # noqa: F401 - first, for a program that is not installed

from gspo.data.datasets import load_rows
from gspo.data.rows import Row
from gspo.rewards import make_scorer
from gspo.types import Group, Prompt, Reward, Rollout

DATASETS = ("arithmetic", "math", "reasoning", "code")


def score(row: Row, answer: str) -> Reward | None:
    """What an answer to a row earns, as in training; None when the reward could not be computed."""
    prompt = Prompt(row.uid, row.messages, (), row.data_source, row.ground_truth, row.extra)
    scorer = make_scorer(None, num_workers=1)
    try:
        scorer.submit(Group(prompt, (Rollout((), (), (), (), "stop", text=answer),), 0, 0))
        return scorer.collect()[0].rollouts[0].reward
    finally:
        scorer.close()


def main() -> int:
    """Print one row of each dataset, and what its right and a wrong answer earn."""
    failed = 0
    for name in DATASETS:
        row = load_rows(name, limit=1)[0]
        assert row.answer is not None
        right, wrong = score(row, row.answer), score(row, "I do not know.")
        good = right is not None and wrong is not None and right.score > wrong.score
        failed += not good
        question = str(row.messages[-1]["content"]).splitlines()[0]
        print(f"{name}: {question[:70]}")
        for kind, reward in (("right", right), ("wrong", wrong)):
            print(f"  {kind} answer earns {'nothing: it failed' if reward is None else reward.score}")
        print(f"  reward test {'passed' if good else 'FAILED'}")
    print("all reward tests passed" if not failed else f"{failed} reward tests failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
