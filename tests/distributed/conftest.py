"""Two launches for all tests here: starting processes takes longer than their work."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo.loop import ending
from tests.distributed.cases import CASES
from tests.distributed.runs import LORA, LOW, PPO, SFT, SHUFFLE, TURNS, Launch, train, train_sft, with_reward_model
from tests.loop.test_moe import make_moe
from tests.support.small_run import make_model, make_reward_model

ON_FOUR = ["sequences", "sequences_critic", "sequences_on_four"]  # two pairs of ranks, and all of them together
ON_TWO = [name for name in CASES if name != "sequences_on_four"]
ON_THREE = ["shared_prompts", "fewer_rows_than_ranks", "critic", "bad_gradients"]
COPIES = "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"
SEQUENCES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
STEPS = ("trainer.total_training_steps=3",)


@dataclass
class Launched:
    """A finished launch: the folder of its runs and its ranks' exit codes."""

    launch: Launch
    codes: list[int]
    folder: Path

    def problem(self) -> str:
        return "\n".join(self.launch.log(rank)[-3000:] for rank in range(self.launch.world))


def once(folder: Path, make: Callable[[Path], Any]) -> Any:
    """The result of `make(folder)`, computed by the first test process that needs it."""
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_suffix(".json")
        if not done.exists():
            done.write_text(json.dumps(make(folder)))
        return json.loads(done.read_text())


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    """A folder that all test processes of this session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def model(work) -> Path:
    return Path(once(work / "model", lambda folder: str(make_model(folder))))


@pytest.fixture(scope="session")
def here(work, model) -> Path:
    """The same runs in this process, without shards: complete ones, and some that stop and resume on ranks."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ending, "write_report", lambda console, run: None)
            train(folder / "whole", model, *STEPS)
            train(folder / "ppo", model, *STEPS, *PPO)
            train(folder / "shuffled", model, *STEPS, *SHUFFLE, stop_after=1)
            train(folder / "begun", model, *STEPS, stop_after=1)
            train(folder / "turns", model, *STEPS, *TURNS, stop_after=2)
            train(folder / "lora", model, *STEPS, *LORA)
            train(folder / "lora begun", model, *STEPS, *LORA, stop_after=1)
            train(folder / "lora low begun", model, *STEPS, *LORA, *LOW, stop_after=1)
            train_sft(folder / "sft", model, *SFT)
            train_sft(folder / "sft lora", model, *SFT, LORA[0])
            train_sft(folder / "sft begun", model, *SFT, stop_after=1)
            scores = make_reward_model(folder / "scores", str(model))
            train(folder / "scored", model, *STEPS, *with_reward_model(scores), stop_after=2)
            train(folder / "moe", make_moe(folder / "moe model", "mixtral"), *STEPS, stop_after=1)

    once(work / "here", make)
    return work / "here"


@pytest.fixture(scope="session")
def two(work, model, here) -> Launched:
    """Two ranks: all cases; a complete run, runs that stop, runs that resume; then one rank is killed."""
    folder = work / "two"
    launch = Launch(2, folder, cases=ON_TWO, fault="killed")
    launch.add(folder / "whole", model, *STEPS)
    launch.add(folder / "sequences", model, *STEPS, SEQUENCES)
    launch.add(folder / "begun", model, *STEPS, COPIES, stop_after=1)
    launch.add(folder / "moe", here / "moe model", *STEPS, stop_after=1)
    launch.add(folder / "ppo", model, *STEPS, *PPO, stop_after=1)
    launch.add(folder / "shuffled", model, *STEPS, *SHUFFLE, stop_after=1)
    launch.add(folder / "low", model, *STEPS, *LOW, stop_after=1)
    launch.add(folder / "turns", model, *STEPS, *TURNS, stop_after=2)
    scored = (*STEPS, *with_reward_model(here / "scores"))
    launch.add(folder / "scored", model, *scored, stop_after=2)
    launch.add(folder / "scored sequences", model, *scored, SEQUENCES, stop_after=1)
    launch.add(folder / "from one", model, *STEPS)
    launch.add(folder / "lora", model, *STEPS, *LORA)
    launch.add(folder / "lora begun", model, *STEPS, *LORA, stop_after=1)
    launch.add(folder / "lora low", model, *STEPS, *LORA, *LOW, stop_after=1)
    launch.add(folder / "lora from one", model, *STEPS, *LORA)
    launch.add(folder / "lora low from one", model, *STEPS, *LORA, *LOW)
    launch.add(folder / "sft", model, *SFT, program="sft")
    launch.add(folder / "sft lora", model, *SFT, LORA[0], program="sft")
    launch.add(folder / "sft from one", model, *SFT, program="sft")
    launch.add(folder / "sft again", model, *SFT, stop_after=2, program="sft")
    launch.add(folder / "sft again", model, *SFT, program="sft")
    launch.add(folder / "again", model, *STEPS, stop_after=2)
    launch.add(folder / "again", model, *STEPS)

    def make(folder: Path) -> list[int]:
        shutil.copytree(here / "begun", folder / "from one")
        shutil.copytree(here / "sft begun", folder / "sft from one")
        shutil.copytree(here / "lora begun", folder / "lora from one")
        shutil.copytree(here / "lora low begun", folder / "lora low from one")
        return launch.run()

    return Launched(launch, once(folder, make), folder)


@pytest.fixture(scope="session")
def four(work) -> Launched:
    """Four ranks: cases in which ranks share sequences."""
    folder = work / "four"
    launch = Launch(4, folder, cases=ON_FOUR)
    return Launched(launch, once(folder, lambda folder: launch.run()), folder)


@pytest.fixture(scope="session")
def three(work, model, two) -> Launched:
    """Three ranks: some cases, and runs that two ranks began; then one rank fails."""
    folder = work / "three"
    launch = Launch(3, folder, cases=ON_THREE, fault="raised")
    launch.add(folder / "from two", model, *STEPS)
    launch.add(folder / "ppo from two", model, *STEPS, *PPO)
    launch.add(folder / "lora from two", model, *STEPS, *LORA)

    def make(folder: Path) -> list[int]:
        shutil.copytree(two.folder / "begun", folder / "from two")
        shutil.copytree(two.folder / "ppo", folder / "ppo from two")
        shutil.copytree(two.folder / "lora begun", folder / "lora from two")
        return launch.run()

    return Launched(launch, once(folder, make), folder)
