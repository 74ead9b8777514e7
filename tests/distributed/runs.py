"""Whole runs: in this process, or as a launch of several."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.loop.episode_run import OVERRIDES
from tests.loop.runs import train as train_here
from tests.loop.supervised_runs import train as train_sft
from tests.support.preloaded import preloaded_python

FSDP = "actor_rollout_ref.actor.strategy=fsdp2"
SLOTS = "actor_rollout_ref.rollout.max_num_seqs=64"  # enough for all groups, however they are spread
NO_EVALUATION = ("trainer.val_before_train=false", "trainer.val_after_train=false")
PPO = (
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
)
LORA = (  # the reference is the policy without its adapters
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
)
SHUFFLE = ("actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.ppo_epochs=2")
SFT = (
    "trainer.val_accuracy=true",
    "data.max_prompt_length=24",
    "data.max_response_length=6",
    "data.num_val_samples=5",
    "data.train_batch_size=9",  # does not divide by the ranks
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
)
TURNS = (*OVERRIDES[:-1], "environment.num_workers=1")  # an environment of three turns
LOW = ("actor_rollout_ref.model.dtype=bfloat16",)


def with_reward_model(path: Path) -> tuple[str, ...]:
    """Overrides of a run whose rewards are a function's and those of the reward model in a folder."""
    return ("reward_model.enable=true", f"reward_model.path={path}", "reward_model.max_tokens_per_batch=40")


def train(folder: Path, model: Path, *overrides: str, stop_after: int | None = None) -> dict[str, Any]:
    return train_here(folder, model, SLOTS, *NO_EVALUATION, *overrides, stop_after=stop_after)


PROGRAMS = {"train": train, "sft": train_sft}


@dataclass
class Launch:
    """Ranks that train together. `runs` are (program, folder, model, overrides, stop after a step)."""

    world: int
    out: Path
    cases: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    fault: str | None = None

    def add(
        self, folder: Path, model: Path, *overrides: str, stop_after: int | None = None, program: str = "train"
    ) -> None:
        words = {"folder": str(folder), "model": str(model), "overrides": [FSDP, *overrides]}
        self.runs.append({"program": program, **words, "stop_after": stop_after})

    def run(self, timeout: float = 240.0) -> list[int]:
        """Run the launch to its end. Returns exit codes by rank; the ranks' output is in `out`/rank-N.log."""
        self.out.mkdir(parents=True, exist_ok=True)
        plan = self.out / "plan.json"
        plan.write_text(
            json.dumps(
                {
                    "world": self.world,
                    "port": free_port(),
                    "out": str(self.out),
                    "cases": self.cases,
                    "runs": self.runs,
                    "fault": self.fault,
                }
            )
        )
        process = subprocess.Popen(
            [preloaded_python(), "-m", "tests.distributed.rank", str(plan)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            assert process.wait(timeout) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return json.loads((self.out / "codes.json").read_text())

    def log(self, rank: int) -> str:
        return (self.out / f"rank-{rank}.log").read_text()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
