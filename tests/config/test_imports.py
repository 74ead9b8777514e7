"""`gspo config import`: scripts and files of other systems become YAML that loads and says what differs."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from gspo.cli import app
from gspo.config import ConfigErrors, load
from gspo.config.imports.importer import import_file
from gspo.config.imports.shell import UNKNOWN, expand, read_shell

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SCRIPT = """#!/bin/bash
set -xeuo pipefail
# a comment with trainer.seed=9
HOME_DATA=${DATA:-$HOME/data}
n=8
batch=$((4 * n))
use_kl=${USE_KL:-True}
files="['$HOME_DATA/train.parquet']"
PERF=(
    actor_rollout_ref.actor.use_dynamic_bsz=True
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * (512 + 512)))"
)
NAME=$(date +%s)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$files" \\
    data.train_batch_size=${batch} \\
    data.train_max_samples=-1 \\
    actor_rollout_ref.model.path=org/model \\
    actor_rollout_ref.actor.use_kl_loss=$use_kl \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.strategy=fsdp \\
    actor_rollout_ref.actor.profiler.enable=True \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.rollout.do_sample=False \\
    trainer.logger='["console","wandb"]' \\
    trainer.experiment_name=$NAME \\
    "${PERF[@]}" $@
"""


def imported(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text)
    out = tmp_path / "out.yaml"
    out.write_text(import_file(path))
    return out.read_text(), out


def test_a_shell_script_of_verl(tmp_path):
    text, path = imported(tmp_path, "run.sh", SCRIPT)
    values = yaml.safe_load(text)
    actor, rollout = values["actor_rollout_ref"]["actor"], values["actor_rollout_ref"]["rollout"]
    assert actor["policy_loss"]["loss_mode"] == "vanilla"  # verl's default, which the script does not name
    assert (actor["use_kl_loss"], actor["strategy"], actor["ppo_max_token_len_per_gpu"]) == (True, "fsdp2", 2048)
    assert (values["data"]["train_batch_size"], rollout["n"], rollout["name"]) == (32, 8, "vllm")
    assert values["trainer"]["logger"] == ["console", "wandb"] and "experiment_name" not in values["trainer"]
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for expected in (
        "trainer.experiment_name: its value is known only when the script runs",
        f"{R}.do_sample = False: only True is supported here",
        "vLLM generates, not sglang",
        f"{A}.profiler.enable = True: has no effect",
        "data.train_files = ['~/data/train.parquet']: no such file",
    ):
        assert any(expected in line for line in comments), (expected, comments)
    assert "seed" not in values["trainer"]
    assert load(path).get(f"{A}.policy_loss.loss_mode") == "vanilla"


def test_an_areal_file(tmp_path):
    text, path = imported(
        tmp_path,
        "areal.yaml",
        "actor: {path: org/model, eps_clip: 0.3, reward_scaling: 2.0, disable_dropout: true, m2_threshold: 0.1}\n"
        "gconfig: {n_samples: 4, max_new_tokens: 64}\ntrain_dataset: {path: gsm8k, batch_size: 8}\n",
    )
    resolved = load(path)
    assert (resolved.get(f"{A}.clip_ratio"), resolved.get("reward.scale"), resolved.get(f"{R}.n")) == (0.3, 2.0, 4)
    assert resolved.get(f"{A}.policy_loss.loss_mode") == "vanilla"
    assert "# Not supported, and left out:" in text and "actor.m2_threshold = 0.1" in text
    assert "actor.disable_dropout = True: has no effect" in text


def test_a_python_file_of_trl(tmp_path):
    text, path = imported(
        tmp_path,
        "train.py",
        "import os\nfrom trl import GRPOConfig, GRPOTrainer\nMODEL = 'org/model'\n"
        "args = GRPOConfig(output_dir='out', num_generations=4, per_device_train_batch_size=8, beta=0.04,\n"
        "    learning_rate=2e-6, run_name=os.environ['NAME'], logging_steps=1, sync_ref_model=True)\n"
        "trainer = GRPOTrainer(model=MODEL, reward_funcs=print, args=args)\nraise SystemExit('never run')\n",
    )
    resolved = load(path)
    assert (resolved.get(f"{M}.path"), resolved.get(f"{R}.n"), resolved.get("data.train_batch_size")) == (
        "org/model",
        4,
        2,
    )
    assert (resolved.get(f"{A}.use_kl_loss"), resolved.get(f"{A}.optim.lr")) == (True, 2e-6)
    assert resolved.get(f"{A}.optim.lr_scheduler_type") == "linear"  # TRL's default
    assert "run_name: its value is known only when the script runs" in text
    assert "sync_ref_model = True: only False is supported here" in text and "logging_steps = 1: has no effect" in text


def test_the_command_writes_a_new_file_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT)
    runner = CliRunner()
    assert runner.invoke(app, ["config", "import", "run.sh"]).stdout.startswith("# Imported from run.sh")
    assert runner.invoke(app, ["config", "import", "run.sh", "--to", "my.yaml"]).exit_code == 0
    assert yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]["train_batch_size"] == 32
    again = runner.invoke(app, ["config", "import", "run.sh", "--to", "my.yaml"])
    assert again.exit_code == 2 and "my.yaml exists" in again.stderr
    assert runner.invoke(app, ["config", "import", "missing.sh"]).exit_code == 2


def test_a_file_that_sets_nothing_is_refused(tmp_path):
    path = tmp_path / "other.sh"
    path.write_text("echo hello\n")
    with pytest.raises(ConfigErrors, match="sets no key"):
        import_file(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${SET}", "given"),
        ("$SET-1", "given-1"),
        ('"${HOME_DIR:-"${OTHER:-"~/verl"}"}/data"', '"""~/verl""/data"'),
        ('${UNSET:-"a b"}', '"a b"'),
        ("${SET:-other}", "given"),
        ("${SET:+yes}${UNSET:+no}", "yes"),
        ("'$SET'", "'$SET'"),
        ("\"'$SET'\"", "\"'given'\""),
        ("$((2 * (3 + $NUM)))", "14"),
        ("$(date +%s)", UNKNOWN),
        ("`date`", UNKNOWN),
        ("${SET%%suffix}", UNKNOWN),
        ("${BASH_SOURCE[0]}", UNKNOWN),
        ("$", "$"),
    ],
)
def test_words_of_the_shell(text, value):
    assert expand(text, {"SET": "given", "NUM": "4"}) == value


def test_a_variable_that_grows(tmp_path):
    """Text is joined as it is, an array gets further words."""
    path = tmp_path / "run.sh"
    lines = ["MODEL=org/base", "MODEL+=-0.5B", "MORE=(data.seed=3)", "MORE+=(trainer.seed=4)"]
    command = 'python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL "${MORE[@]}"'
    path.write_text("\n".join([*lines, command]) + "\n")
    values = yaml.safe_load(import_file(path))
    assert values["actor_rollout_ref"]["model"]["path"] == "org/base-0.5B"
    assert (values["data"]["seed"], values["trainer"]["seed"]) == (3, 4)


KNOWN = {"a": "1", "b": "two words", "e": "", "list": "x=1 'y=2 3'"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$a-${a}", "1-1"),
        ("'$a' \"$a\"", "'$a' \"1\""),
        ('"it\'s $a"', '"it\'s 1"'),
        (r"\$a $", r"\$a $"),
        ("${c:-$a}", "1"),
        ("${a:-2}", "1"),
        ("${c-}${c:=3}", "3"),
        ("${a:+set}${c:+set}", "set"),
        ("${c}", UNKNOWN),
        ("$c", UNKNOWN),
        ("${a#x}", UNKNOWN),
        ("$@${@}", ""),
        ('"${list[@]}"', "x=1 'y=2 3'"),
        ("${c:-${d:-deep}}!", "deep!"),
        ("$(echo $(date))x`date`", UNKNOWN + "x" + UNKNOWN),
        ("$((2 * (a + 3)))", "8"),
        ("$((7 / 2))$((7 % 4))$((2 ** 3))$((-a))$((a - 3))", "338-1-2"),
        ("$((c + 1))", UNKNOWN),
        ("$((1 / 0))", UNKNOWN),
        ("$((1 < 2))", UNKNOWN),
        ("'open", "'open"),
    ],
)
def test_words_of_a_script_are_expanded(text, value):
    assert expand(text, dict(KNOWN)) == value


def test_the_arguments_of_a_script_with_arrays_continuations_and_comments(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "export n=4 # a remark\n"
        "  # python main_ppo trainer.seed=9\n"
        "n+=2\n"
        "local more=(\n  data.seed=3\n  'data.prompt_key=my key'\n)\n"
        "more+=(data.shuffle=False)\n"
        "other=$(nproc)\n"
        "broken='open\n"
        "python -m main_ppo \\\n"
        "  trainer.seed=$((n / 2)) word plain=1 \\\n"
        '  "${more[@]}" trainer.project_name=$other trainer.logger=[a\n'
        "n=8\n"
        "python scripts/main_ppo.py trainer.nnodes=$n 'unclosed\n"
    )
    found = read_shell(path)
    assert found.system == "verl"
    assert [(s.name, s.value, s.origin.text) for s in found.settings] == [
        ("trainer.seed", 21, "run.sh:11"),
        ("data.seed", 3, "run.sh:11"),
        ("data.prompt_key", "my key", "run.sh:11"),
        ("data.shuffle", False, "run.sh:11"),
        ("trainer.logger", "[a", "run.sh:11"),
    ]
    assert found.unknown == [
        "run.sh:11: trainer.project_name: its value is known only when the script runs",
        "run.sh:15: the command cannot be read",
    ]
