"""Twenty-odd broken configurations: exit code 2, the key's name and a suggestion, before any model library is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gspo.cli import app

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"

# words after `gspo train`, the name that must be said, what must be suggested
BROKEN: list[tuple[str, str, str]] = [
    ("data.trian_batch_size=64", "data.trian_batch_size", "data.train_batch_size"),
    ("actor_rollout_ref.actor.clip_ratio_hgih=4e-4", "clip_ratio_hgih", f"{A}.clip_ratio_high"),
    ("algorithm.filter_group.enable=true", "algorithm.filter_group.enable", "algorithm.filter_groups.enable"),
    ("--gruop_size 4", "gruop_size", "group_size"),
    ("--learning_rat=1e-6", "learning_rat", "learning_rate"),
    ("data.clip_ratio_low=3e-4", "data.clip_ratio_low", f"{A}.clip_ratio_low"),
    (f"{A}.policy_loss.loss_mode=gsop", f"{A}.policy_loss.loss_mode", "did you mean gspo"),
    (f"{A}.loss_agg_mode=seq_mean_token_mean", f"{A}.loss_agg_mode", "seq-mean-token-mean"),
    ("algorithm.adv_estimator=grppo", "algorithm.adv_estimator", "did you mean grpo"),
    ("data.train_batch_size=many", "data.train_batch_size", "e.g. data.train_batch_size=1024"),
    ("data.train_batch_size=2.5", "data.train_batch_size", "expected int"),
    (f"{R}.n=0", f"{R}.n", "at least 1"),
    (f"{R}.temperature=-1", f"{R}.temperature", "greater than 0"),
    (f"algorithm.filter_groups.enable=true {R}.n=1", f"{R}.n", "at least 2"),
    (f"data.train_batch_size=32 {A}.ppo_mini_batch_size=5", f"{A}.ppo_mini_batch_size", "ppo_mini_batch_size=4"),
    ("data.num_train_samples=8 data.train_batch_size=32", "data.num_train_samples", "at most 8"),
    ("data.train_files=nowhere.jsonl", "data.train_files", "a built-in task or a hub name"),
    ("custom_reward_function.path=nowhere.py", "custom_reward_function.path", "Python file"),
    ("trainer.resume_mode=disabled", "trainer.resume_mode", "did you mean disable"),
    ("trainer.device=gpu", "trainer.device", "did you mean cuda?"),
    ("trainer.logger=[console,wandbb]", "trainer.logger", "wandb"),
    ("reward_model.enable=true", "reward_model.path", "folder"),
    (f"{A}.importance_sampling_level=token loss_mode=gspo", f"{A}.importance_sampling_level", "loss_mode=vanilla"),
    ("data=5", "data", "data.KEY"),
    ("n=4", "could mean several keys", f"{R}.n or {R}.val_kwargs.n"),
    ("data.gen_batch_size=${data.nothing}", "data.gen_batch_size", "let ${…} refer to a key that is set"),
    ("--update_frequency 5 --batch_size 8", "update_frequency", "multiple of 5"),
    ("--learning_rate", "--learning_rate", "write --learning_rate VALUE"),
    ("nowhere.yaml", "nowhere.yaml", "check the path"),
]
BROKEN_FILES = [
    ("data: {train_batch_size: 64\n", "cannot be read as YAML", "line"),
    ("data:\n  train_batch_size: 8\n  train_batch_size: 16\n", "duplicate key train_batch_size", "fix the line"),
    ("- a\n- b\n", "expected a mapping", "section"),
    ("data: !!python/object/apply:os.system ['true']\n", "cannot be read as YAML", "no Python objects"),
    ("trainer:\n  seed: 1\n  totel_epochs: 3\n", "run.yaml:3", "trainer.total_epochs"),
    ("algorithm:\n  gamma: [1]\n", "run.yaml:2", "algorithm.gamma"),
]


def invoke(*words: str):
    return CliRunner().invoke(app, ["train", "--dry-run", *words])


@pytest.mark.parametrize(("words", "name", "suggestion"), BROKEN)
def test_a_broken_config_is_named_and_mended(words, name, suggestion):
    result = invoke(*words.split(" "))
    assert result.exit_code == 2, result.output
    assert name in result.stderr and suggestion in result.stderr, result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


@pytest.mark.parametrize(("text", "name", "suggestion"), BROKEN_FILES)
def test_a_broken_file_is_named_and_mended(tmp_path, text, name, suggestion):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    result = invoke(str(path))
    assert result.exit_code == 2, result.output
    assert name in result.stderr and suggestion in result.stderr and "run.yaml" in result.stderr, result.stderr


def test_a_python_object_in_yaml_is_never_built(tmp_path):
    canary = tmp_path / "canary"
    path = tmp_path / "run.yaml"
    path.write_text(
        f"data: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{canary}']]\n"
    )
    assert invoke(str(path)).exit_code == 2
    assert not canary.exists()


def test_the_program_itself_exits_2_without_loading_a_model_library():
    code = (
        "import sys\nfrom gspo.cli import app\n"
        "try:\n    app(['train', 'data.trian_batch_size=64'])\n"
        "except SystemExit as stop:\n"
        "    print(stop.code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2 []", done.stderr
    assert "did you mean data.train_batch_size?" in done.stderr
