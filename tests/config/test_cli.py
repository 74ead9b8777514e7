"""The command line: version, config show and explain, train --dry-run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from gspo import __version__
from gspo.cli import COMMANDS, FOLDERS, app
from gspo.commands.arguments import load_arguments
from gspo.config import load
from gspo.config.loading.flags import split_arguments


def run(*words: str):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result


def test_version():
    assert run("--version").stdout == f"gspo {__version__}\n"


def test_only_commands_whose_module_exists_are_listed():
    listed = run("--help").stdout
    assert "train" in listed and "config" in listed
    assert CliRunner().invoke(app, ["no-such-command"]).exit_code == 2
    for name in COMMANDS:
        assert (
            find_spec(f"gspo.commands.{FOLDERS[name]}.{name}" if name in FOLDERS else f"gspo.commands.{name}")
            is not None
        )


def test_show_prints_values_with_origins_that_load_again(tmp_path):
    shown = run("config", "show", "data.train_batch_size=64", "--group_size", "4").stdout
    assert "train_batch_size: 64  # override data.train_batch_size=64" in shown
    assert "n: 4  # flag --group_size" in shown
    path = tmp_path / "saved.yaml"
    path.write_text(shown)
    wanted = load(overrides=["data.train_batch_size=64"], flags=["--group_size", "4"])
    assert load(path).to_dict() == wanted.to_dict()
    assert "#" not in run("config", "show", "--no-origins").stdout


def test_show_diff_and_config_option(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref: {model: {path: org/model}}\nalgorithm:\n  gamma: 0.5\n")
    for words in ([str(path)], ["--config", str(path)]):
        result = CliRunner().invoke(app, ["config", "show", *words, "--diff"])
        assert "gamma: 0.5" in result.stdout and f"{path}:3" in result.stdout
        assert "lam" not in result.stdout
        assert "has no effect" in result.stderr  # grpo does not discount


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("actor_rollout_ref.actor.clip_ratio_low", ["float or null", "default: null", "left_clip_range", "> 0"]),
        ("clip_ratio_low", ["actor_rollout_ref.actor.clip_ratio_low"]),
        (
            "group_size",
            [
                "another name for actor_rollout_ref.rollout.n, from standalone scripts, AReaL",
                "actor_rollout_ref.rollout.n",
                "num_generations (TRL)",
            ],
        ),
        ("update_frequency", ["every k optimiser steps", "ppo_mini_batch_size"]),
        ("algorithm.filter_groups", ["Dynamic sampling", "algorithm.filter_groups.metric"]),
        ("algorithm.filter_groups.strategy", ["stream, rounds"]),
        ("data.max_prompt_length", ["unit: tokens"]),
        ("trainer.balance_batch", ["no effect here", "balanced by tokens"]),
    ],
)
def test_explain(key, parts):
    text = run("config", "explain", key).stdout
    assert all(part in text for part in parts), text


def test_explain_says_which_keys_may_change_on_resume():
    assert "may change when a run is resumed" in run("config", "explain", "trainer.save_freq").stdout
    assert "resumed" not in run("config", "explain", "trainer.seed").stdout


def test_explain_an_unknown_key_suggests_and_exits_2():
    result = CliRunner().invoke(app, ["config", "explain", "clip_ratio_hgih"])
    assert result.exit_code == 2 and "did you mean" in result.stderr and "clip_ratio_high" in result.stderr


def test_dry_run_prints_the_plan():
    words = (
        "actor_rollout_ref.model.path=org/model data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16"
    )
    text = run("train", "--dry-run", *words.split(), "--group_size", "4", "--max_steps=9").stdout
    for part in (
        "rollouts per step          256 (64 groups of 4)",
        "generation batch           64 prompts, at most 1 batch per step",
        "optimiser steps per step   4 (4 mini-batches x 1 epoch)",
        "training steps             9",
        "trained tokens per step    up to 131,072",
        "[1 - 0.0003, 1 + 0.0004]",
        "no effect",
        "keys of the critic: this config uses no critic",
    ):
        assert part in text, text


def test_dry_run_names_what_was_set_in_vain():
    text = run("train", "--dry-run", "actor_rollout_ref.model.path=org/model", "data.gen_batch_size=9").stdout
    assert "data.gen_batch_size: has no effect: dynamic sampling is off" in text


def test_every_command_of_the_standalone_documents_resolves():
    for line in (
        "--dataset mixed --num_train_samples 50 --num_epochs 3",
        "--dataset math --num_train_samples 200 --num_epochs 5",
        "--model_name Qwen/Qwen2.5-7B-Instruct --dataset gsm8k --num_train_samples 1000 --num_epochs 10 --use_wandb",
        "--dataset mixed --num_train_samples 20 --num_epochs 2",
        "--model_name Qwen/Qwen2.5-14B-Instruct --dataset math",
        "--dataset gsm8k --num_train_samples 1000 --num_epochs 10 --batch_size 4 --learning_rate 1e-6 --use_wandb",
        "--dataset code --num_train_samples 500 --num_epochs 8 --group_size 6",
        "--left_clip_range 2e-4 --right_clip_range 5e-4 --update_frequency 3",
        "--max_length 1024 --batch_size 8 --mini_batch_size 2",
        "--model_name microsoft/DialoGPT-medium",
        "--batch_size 2 --group_size 2",
        "--learning_rate 5e-7",
        "--update_frequency 2",
        "--learning_rate 2e-6",
        "--num_train_samples 500",
        "--model_name Qwen/Qwen2.5-7B-Instruct --dataset gsm8k --group_size 4 --left_clip_range 3e-4 "
        "--right_clip_range 4e-4 --learning_rate 1e-6 --num_train_samples 2000 --num_epochs 15 --update_frequency 5 "
        "--use_wandb",
    ):
        run("train", "--dry-run", *line.split())


def test_words_are_sorted_into_files_overrides_and_flags():
    words = "run.yaml --use_wandb a.b=1 --group_size 4 --test_freq -1 --lr=3 +c=2 --no-shuffle_it --use_kl_loss false x"
    assert split_arguments(words.split()) == (
        ["run.yaml", "x"],
        ["a.b=1", "+c=2"],
        [
            "--use_wandb",
            "--group_size",
            "4",
            "--test_freq",
            "-1",
            "--lr=3",
            "--no-shuffle_it",
            "--use_kl_loss",
            "false",
        ],
    )


def test_switches_stand_alone_or_with_a_value_or_negated():
    def kl(*flags: str) -> bool:
        return load_arguments(["actor_rollout_ref.model.path=m", *flags]).config.actor_rollout_ref.actor.use_kl_loss

    assert [kl("--use_kl_loss"), kl("--use_kl_loss", "true"), kl("--use-kl-loss=yes")] == [True] * 3
    assert [kl("--use_kl_loss", "false"), kl("--no-use_kl_loss"), kl()] == [False] * 3


def test_train_runs_the_loop_and_returns_its_exit_code(monkeypatch):
    import sys
    import types

    seen = []
    fake = types.ModuleType("gspo.loop.run")
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    fake.run_program = lambda config: seen.append(config) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gspo.loop.run", fake)
    result = CliRunner().invoke(app, ["train", "data.train_batch_size=64"])
    assert result.exit_code == 3
    assert seen[0].get("data.train_batch_size") == 64


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nosuchkey", None),
        ("zzz", None),
        ("tempreture", "temperature"),
        ("groupsize", "group_size"),
        ("trainer.total_training_stepz", "trainer.total_training_steps"),
    ],
)
def test_a_far_name_gets_no_suggestion(name: str, near: str | None):
    result = CliRunner().invoke(app, ["config", "explain", name])
    assert result.exit_code == 2
    if near is None:
        assert result.stderr.strip() == f"unknown key {name}; `gspo config show` prints every key"
    else:
        assert f"did you mean {near}?" in result.stderr
