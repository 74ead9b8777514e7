"""How a run ends early, which checkpoints are kept for being the best, and which of them `gspo eval RUN` uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.checkpoint.folder import all_steps
from gspo.cli import app
from gspo.config import load
from gspo.config.schema.trainer import EarlyStopConfig
from gspo.loop.best import best_steps, why_stop
from gspo.loop.callbacks import Callback
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from gspo.runs.folder import step_of
from tests.support.small_run import config, even_first_byte, make_model

NAME = "val-core/arithmetic/acc/mean@1"


def rows(*values: float | None, name: str = NAME) -> list[dict]:
    return [{"step": step, **({} if value is None else {name: value})} for step, value in enumerate(values)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_the_best_steps_come_first_and_of_equal_ones_the_earlier():
    known = rows(0.1, None, 0.4, 0.4, 0.3)
    assert best_steps(known, 2) == [2, 3]
    assert best_steps(known, 2, among=[0, 3, 4]) == [3, 4]
    assert best_steps(rows(None, None), 2) == []
    assert best_steps(rows(2.0, 1.0, name="val/loss"), 1) == [1]  # of a supervised run, by its loss


@pytest.mark.parametrize(
    ("values", "settings", "ends"),
    [
        ([0.1, 0.2, 0.2, 0.2], {"patience": 2}, True),
        ([0.1, 0.2, None, 0.2], {"patience": 2}, False),
        ([0.1, 0.2, 0.15, 0.25], {"patience": 2}, False),
        ([0.1, 0.2, 0.21, 0.22], {"patience": 2, "min_delta": 0.05}, True),
        ([0.1, 0.1, 0.1, 0.1], {"patience": 0}, False),
    ],
)
def test_a_run_without_improvement_ends_after_its_patience(values, settings, ends):
    reason = why_stop(rows(*values), EarlyStopConfig(**settings))
    assert (reason is not None) == ends
    assert reason is None or "since step 1" in reason


@pytest.mark.parametrize("name", ["val/loss", "val/perplexity"])
def test_a_loss_should_fall(name):
    settings = EarlyStopConfig(metric=name, patience=2)
    assert why_stop(rows(3.0, 2.0, 1.0, name=name), settings) is None
    assert why_stop(rows(1.0, 2.0, 3.0, name=name), settings) is not None


def test_a_run_ends_early_with_a_checkpoint_and_a_result_and_stays_ended(tmp_path, model, capsys):
    still = ["actor_rollout_ref.actor.optim.lr=0", "trainer.test_freq=1", "trainer.early_stop.patience=2"]
    result = Trainer(config(tmp_path, model, *still), even_first_byte).fit()
    assert result["steps"] == 2 and (tmp_path / "run" / "result.json").exists()
    assert "the run ends early (trainer.early_stop.patience=2)" in capsys.readouterr().out
    assert Trainer(config(tmp_path, model, *still), even_first_byte, console=Console(enabled=False)).fit()["steps"] == 2
    more = [*still, "trainer.early_stop.patience=9"]
    assert Trainer(config(tmp_path, model, *more), even_first_byte, console=Console(enabled=False)).fit()["steps"] == 4


def test_the_best_checkpoint_is_kept_and_evaluated(tmp_path, model):
    figures = iter([0.1, 0.2, 0.9, 0.3, 0.4])  # before training, then by step

    class Pretend(Callback):
        """The evaluations of this run, as an accuracy that we choose."""

        def on_evaluate(self, trainer, step, evaluation):
            name = next(name for name in evaluation.metrics if name.endswith("acc/mean@1"))
            evaluation.metrics[name] = type(evaluation.metrics[name])("last", next(figures))

    words = ["trainer.test_freq=1", "trainer.keep_best=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.save_freq=-1"]
    words += [f"custom_reward_function.path={tmp_path / 'mine.py'}", "custom_reward_function.name=score"]
    (tmp_path / "mine.py").write_text(
        "def score(prompt, response):\n    return {'score': 1.0 * len(response) % 2, 'acc': 1.0 * len(response) % 2}\n"
    )
    Trainer(config(tmp_path, model, *words), callbacks=[Pretend()], console=Console(enabled=False)).fit()
    run = tmp_path / "run"
    assert [step_of(path.name) for path in all_steps(run / "checkpoints")] == [2, 4]
    result = CliRunner().invoke(app, ["eval", str(run), "--limit", "4"])
    assert result.exit_code == 0 and "step-000002 on arithmetic: 4 questions" in result.stdout, result.output


def test_the_newest_checkpoint_is_evaluated_where_the_best_is_not_kept_and_failed_rewards_exit_1(tmp_path, model):
    (tmp_path / "mine.py").write_text("def score(prompt, response):\n    return 1.0 * len(response) % 2\n")
    words = [f"custom_reward_function.path={tmp_path / 'mine.py'}", "custom_reward_function.name=score"]
    settings = config(tmp_path, model, *words, "trainer.total_training_steps=1", "trainer.val_before_train=false")
    Trainer(settings, console=Console(enabled=False)).fit()
    (tmp_path / "mine.py").write_text("def score(prompt, response):\n    return 1 / 0\n")
    result = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--limit", "4"])
    assert result.exit_code == 1 and "step-000001 on arithmetic" in result.stdout
    assert "4 of 4 rewards failed; the first: reward function score" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text(load(None, []).to_yaml())
    result = CliRunner().invoke(app, ["eval", str(tmp_path)])
    assert result.exit_code == 2 and "has no checkpoint yet" in result.stderr
