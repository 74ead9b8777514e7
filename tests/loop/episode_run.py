"""A small run whose rollouts have turns: its environment, and a program that trains it.

`python -m tests.loop.episode_run FOLDER MODEL [override …]`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gspo.environments.protocol import Action, Step
from gspo.types import Prompt

MARKS = "GSPO_TEST_MARKS"  # a file that grows by one byte with every answer of an environment


class Parity:
    """Asks three times for an even character; each turn earns by it. Slow enough to be killed in the middle of a turn."""

    tools = ()

    def reset(self, prompt: Prompt, seed: int):
        self._secret = seed % 7
        return ({"role": "user", "content": f"n{self._secret}"},)

    def step(self, action: Action) -> Step:
        if MARKS in os.environ:
            with open(os.environ[MARKS], "ab") as file:
                file.write(b".")
        even = bool(action) and ord(action[0]) % 2 == 0
        message = {"role": "user", "content": "ab"[even] + str(self._secret)}
        done = action.turn == 2
        return Step((message,), reward=float(even) - 0.1 * action.turn, done=done, metrics={"acc": float(even)})

    def close(self) -> None: ...


OVERRIDES = (
    "environment.path=tests.loop.episode_run",
    "environment.name=Parity",
    "data.train_files=guess",
    "data.max_response_length=24",
    "data.max_prompt_length=32",
    "algorithm.filter_groups.metric=seq_reward",
    "actor_rollout_ref.rollout.max_num_seqs=7",
)


def main(folder: str, model: str, *overrides: str) -> int:
    from gspo.loop.run import run_program
    from tests.support.small_run import config

    return run_program(config(Path(folder), Path(model), *OVERRIDES, *overrides))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
