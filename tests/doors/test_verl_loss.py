"""What verl's doors train: PPO's token ratio unless another loss is named, told by the weights and not by the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.config import load
from gspo.report.run_card import run_card
from gspo.runs.run import read_run
from gspo.trainer.config import (
    ActorRolloutRefConfig,
    AlgoConfig,
    DataConfig,
    FilterGroupsConfig,
    PolicyLossConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
)
from gspo.trainer.main_ppo import main as main_ppo
from gspo.trainer.ppo import PPOTrainerWithSampling
from tests.doors.test_snippets import ROWS, shrink
from tests.doors.worlds import MODELS, SMALL, load_script, rows
from tests.support.small_run import even_first_byte

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
TINY = (
    *SMALL,
    f"actor_rollout_ref.model.path={MODELS[0]}",
    "data.train_batch_size=4",
    "data.num_train_samples=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.rollout.n=4",
)


def document(estimator: str) -> TrainerConfig:
    """Examples 1 and 2 of the document, small; no loss is named."""
    config = TrainerConfig(
        algorithm=AlgoConfig(adv_estimator=estimator, filter_groups=FilterGroupsConfig(enable=True)),
        data=DataConfig(gen_batch_size=1536, train_batch_size=512),
        actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(n=4)),
        trainer=PPOTrainerConfig(critic_warmup=0),
    )
    config.actor_rollout_ref.actor.optim.lr = 1e-2
    return shrink(config)


def weights(run: Path) -> dict[str, torch.Tensor]:
    (last,) = (run / "checkpoints").glob("step-*")
    return load_file(last / "model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def trained_by_class(here: Path, config: Any, name: str) -> dict[str, torch.Tensor]:
    trainer = PPOTrainerWithSampling(config=config, reward_fn=even_first_byte, train_dataset=ROWS)
    trainer.config.config.trainer.experiment_name = name
    trainer.fit()
    return weights(here / "runs" / name)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_class_trains_the_token_ratio(here, estimator):
    """The same bits as with loss_mode=vanilla, other ones than with gspo."""
    trained = {"default": trained_by_class(here, document(estimator), "default")}
    for loss in ("vanilla", "gspo"):
        config = document(estimator)
        config.actor_rollout_ref.actor.policy_loss = PolicyLossConfig(loss_mode=loss)
        trained[loss] = trained_by_class(here, config, loss)
    assert same(trained["default"], trained["vanilla"]) and not same(trained["default"], trained["gspo"])
    assert {row["actor/clip_ratio_high"] for row in rows(here / "runs" / "default")} == {0.2}


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ([], "vanilla"),
        (["algorithm.adv_estimator=rloo"], "vanilla"),
        ([f"{LOSS}=gspo"], "gspo"),
        (["actor_rollout_ref.actor.importance_sampling_level=sequence"], "gspo"),
    ],
)
def test_the_entry_script_trains_what_verl_would(here, words, loss):
    """`python -m verl.trainer.main_ppo …` under our path."""
    assert main_ppo([*TINY, *words, "trainer.experiment_name=default"]) == 0
    assert main_ppo([*TINY, *words, f"{LOSS}={loss}", "trainer.experiment_name=named"]) == 0
    assert same(weights(here / "runs" / "default"), weights(here / "runs" / "named"))
    other = "gspo" if loss == "vanilla" else "vanilla"
    rest = [word for word in words if "importance" not in word and "loss_mode" not in word]
    assert main_ppo([*TINY, *rest, f"{LOSS}={other}", "trainer.experiment_name=other"]) == 0
    assert not same(weights(here / "runs" / "default"), weights(here / "runs" / "other"))


@pytest.mark.parametrize("name", ["grpo_dynamic_sampling", "ppo_dynamic_sampling"])
def test_the_examples_train_grpo_and_ppo(here, name):
    module = load_script(f"examples/{name}.py")
    config = module.make_config()
    config.data.gen_batch_size, config.data.train_batch_size = 8, 4
    config.trainer.total_training_steps, config.trainer.num_threads = 2, 1
    config.trainer.critic_warmup, config.trainer.experiment_name = 0, "run"
    module.main(config)
    row = rows(here / "runs" / "run")[-1]
    assert (row["actor/clip_ratio_low"], row["actor/clip_ratio_high"]) == (0.2, 0.2)
    assert "actor/pg_clipfrac_dual" in row  # only PPO's loss has a dual clip


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["algorithm.adv_estimator=grpo"], "vanilla: token ratio, clipped to [1 - 0.2, 1 + 0.2], grpo advantages"),
        (["algorithm.adv_estimator=gae"], "vanilla: token ratio, clipped to [1 - 0.2, 1 + 0.2], gae advantages"),
        ([], "gspo: sequence ratio, clipped to [1 - 0.0003, 1 + 0.0004], grpo advantages"),
    ],
)
def test_gspo_train_with_an_estimator_trains_its_method_and_says_so(here, capsys, words, line):
    from gspo.loop.run import run_program

    resolved = load(overrides=[*TINY, *words])
    assert run_program(resolved) == 0
    assert line in capsys.readouterr().out.splitlines()[0]
    (run,) = (here / "runs").iterdir()
    assert ("actor/pg_clipfrac_dual" in rows(run)[-1]) is line.startswith("vanilla")


def test_an_own_estimator_leaves_the_loss(here):
    plugin = here / "mine.py"
    plugin.write_text(
        "import gspo\nfrom gspo.algo.advantages import ADVANTAGE_ESTIMATORS\n"
        "if 'mine' not in ADVANTAGE_ESTIMATORS.names():\n"
        "    gspo.advantage_estimator('mine')(ADVANTAGE_ESTIMATORS.get('grpo').formula)\n"
    )
    config = load(overrides=["trainer.plugins=[mine.py]", "algorithm.adv_estimator=mine"])
    assert config.get(LOSS) == "gspo"


def test_the_run_names_the_rows_that_it_was_given(here, capsys):
    """Not the default of data.train_files, in its first line, its report and its card."""
    config = document("grpo")
    PPOTrainerWithSampling(config=config, reward_fn=even_first_byte, train_dataset=ROWS).fit()
    assert f"on {len(ROWS)} rows passed in Python, vanilla" in capsys.readouterr().out.splitlines()[0]
    card = run_card(read_run(here / "runs" / "run"))
    assert f"| training data | {len(ROWS)} rows passed in Python |" in card
    assert "| reward | even_first_byte, passed in Python |" in card and "arithmetic" not in card.split("## Settings")[0]
