"""docs/metrics.md lists every metric that a run logs, and no metric that none does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gspo.config import load, load_supervised
from gspo.loop.supervised import SupervisedTrainer
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SMALL = (
    "trainer.total_training_steps=2",
    "trainer.num_threads=1",
    "data.num_val_samples=4",
    "data.num_train_samples=16",
    "data.max_response_length=12",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.filter_groups.max_num_gen_batches=4",
    "algorithm.filter_groups.on_limit=keep_unfiltered",
    "trainer.test_freq=1",
)
RUNS: dict[str, tuple[str, ...]] = {
    "the recipe with the decoupled loss": (
        "actor_rollout_ref.actor.use_decoupled_loss=true",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "trainer.save_freq=1",
    ),
    "PPO with a critic and KL in the reward": (
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.2",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.distill_weight=0.1",
        "actor_rollout_ref.ref.path=embedded",
    ),
    "ReMax with rollout workers and two rewards": (
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.num_workers=2",
        "reward.format_weight=0.1",
    ),
    "an environment": (
        *("environment.name=guess", "data.train_files=guess", "data.max_response_length=40"),
        *("algorithm.filter_groups.enable=false", "trainer.total_training_steps=1"),
    ),
    "prediction on prompts that repeat": (
        "algorithm.filter_groups.predict=skip",
        "data.sft_files=arithmetic",
        "data.num_train_samples=4",
        "trainer.total_training_steps=3",
    ),
}
SUPERVISED = (
    *("trainer.total_training_steps=2", "trainer.num_threads=1", "data.num_val_samples=4", "data.train_batch_size=4"),
    *("trainer.val_accuracy=true", "data.max_response_length=12", "data.max_prompt_length=32"),
)
# Documented metrics that need what the runs above do not have: bad numbers, a mixture of experts and a group filter.
NOT_RUN = {"actor/nonfinite_loss", "actor/nonfinite_gradient", "actor/router_change", "train/groups_filtered"}
# With a judge (tests/rewards/judge) and a reward model (tests/learning/test_reward_model.py).
NOT_RUN |= {f"judge/{name}" for name in ("calls", "cache_hits", "failures", "tokens", "seconds", "disagreement")}
NOT_RUN |= {"reward_model/disagreement"}
# With an engine on pages (tests/rollout/native/test_held.py).
NOT_RUN |= {"rollout/prefix_saved"}
# With rewards that fail in an evaluation (tests/evaluation/test_evaluator.py).
NOT_RUN |= {"val-aux/{source}/reward_failures/share"}


def documented() -> dict[str, re.Pattern[str]]:
    """The names in the first column of the page's tables, each as the pattern of what it stands for."""
    cells = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {name: re.compile(_pattern(name)) for name in names}


def _pattern(name: str) -> str:
    parts = re.split(r"\{([^}]*)\}", name)
    for i in range(1, len(parts), 2):
        parts[i] = f"({parts[i].replace(',', '|')})" if "," in parts[i] else _placeholder(parts[i])
    return "".join(part if i % 2 else re.escape(part) for i, part in enumerate(parts))


def _placeholder(name: str) -> str:
    return r"\d+" if name in ("i", "k") else r".+"


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> set[str]:
    """Every metric that one of the runs logs."""
    found: set[str] = set()
    for number, extra in enumerate(RUNS.values()):
        folder = tmp_path_factory.mktemp(f"run-{number}")
        config = load(overrides=[*SMALL, f"trainer.default_local_dir={folder}", *extra])
        Trainer(config, console=Console(enabled=False)).fit()
        found |= names_in(folder)
    folder = tmp_path_factory.mktemp("supervised")
    config = load_supervised(overrides=[*SUPERVISED, f"trainer.default_local_dir={folder}"])
    SupervisedTrainer(config, console=Console(enabled=False)).fit()
    return (found | names_in(folder)) - {"step"}


def names_in(folder: Path) -> set[str]:
    """Every metric of the one run in a folder."""
    (rows,) = folder.glob("*/metrics.jsonl")
    return {name for line in rows.read_text().splitlines() for name in json.loads(line)}


def test_every_logged_metric_is_documented(logged):
    patterns = documented().values()
    missing = sorted(name for name in logged if not any(p.fullmatch(name) for p in patterns))
    assert not missing, f"not in {PAGE.name}: {missing}"


def test_every_documented_metric_is_logged(logged):
    never = {name for name, p in documented().items() if not any(map(p.fullmatch, logged))}
    assert never == NOT_RUN
