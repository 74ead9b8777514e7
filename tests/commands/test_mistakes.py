"""Mistakes of a beginner: each ends with exit code 2 and one clear message, without a traceback or a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from gspo.cli import app
from tests.support.small_run import make_model

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SMALL = ["trainer.total_training_steps=1", "data.train_batch_size=4", "rollout.n=2", "trainer.val_before_train=false"]
# What is typed after `gspo`, and what the message must say.
MISTAKES = {
    "a command misspelt": (["trian"], ["No such command 'trian'. Did you mean train?"]),
    "a key misspelt": (["train", "data.train_batchsize=8"], ["unknown key", "did you mean data.train_batch_size?"]),
    "a key of another system": (
        ["train", "trainer.load_best_model_at_end=true"],
        ["unknown key", "set trainer.keep_best=1"],
    ),
    "explain a key that is not there": (["config", "explain", "batchsize"], ["unknown key batchsize", "did you mean"]),
    "a word for a number": (
        ["train", "data.train_batch_size=many"],
        ["data.train_batch_size = 'many'", "expected int"],
    ),
    "a batch that does not divide": (
        ["train", "data.train_batch_size=10", "ppo_mini_batch_size=4"],
        ["must divide data.train_batch_size = 10", "ppo_mini_batch_size=2"],
    ),
    "a config file that is not there": (["train", "my.yaml"], ["my.yaml", "no such file"]),
    "a data file that is not there": (["train", "data.train_files=my.jsonl"], ["no such file: my.jsonl"]),
    "a file that is not JSON": (["train", "data.train_files=broken.jsonl"], ["broken.jsonl:1: is not JSON"]),
    "a dataset misspelt": (["train", "data.train_files=aritmetic"], ["did you mean 'arithmetic'?"]),
    "rows without a reward": (["train", "data.train_files=rows.jsonl"], ["the row has no data_source"]),
    "a reward file that is not there": (
        ["train", "custom_reward_function.path=nowhere.py"],
        ["custom_reward_function.path = 'nowhere.py'", "no such file"],
    ),
    "a function that is not in the file": (
        ["train", "custom_reward_function.path=mine.py", "custom_reward_function.name=nothing"],
        ["has no function 'nothing'; it has boom, score"],
    ),
    "a reward that raises": (
        ["train", "custom_reward_function.path=mine.py", "custom_reward_function.name=boom"],
        ["ZeroDivisionError", "mine.py"],
    ),
    "a reward without a name": (["train", "reward.functions=[{path: mine.py}]"], ["has no `name`"]),
    "a model folder that is not there": (
        ["train", "model.path=./nowhere"],
        ["actor_rollout_ref.model.path = './nowhere'", "no such folder"],
    ),
    "a path that no hub has": (["train", "model.path=models/of/mine"], ["models/of/mine: there is no such folder"]),
    "a folder that is not a model": (["eval", "empty"], ["empty: the folder has no config.json"]),
    "gpu instead of cuda": (["train", "trainer.device=gpu"], ["expected auto, cpu", "did you mean cuda?"]),
    "a plugin that is not there": (["train", "trainer.plugins=plugin.py"], ["plugin.py"]),
    "wandb without an account": (["train", "trainer.logger=wandb", *SMALL], ["trainer.logger: wandb", "wandb login"]),
    "a filter without groups": (
        ["train", "rollout.n=1", "algorithm.filter_groups.enable=true"],
        ["dynamic sampling needs groups of at least 2"],
    ),
    "a prompt that is longer than allowed": (
        ["train", "data.train_files=rows.jsonl", "data.max_prompt_length=2", "reward.functions=[{name: exact}]"],
        ["left no prompt", "data.max_prompt_length=2"],
    ),
    "steps as an option": (["train", "--steps", "10"], ["unknown key", "did you mean trainer.total_training_steps?"]),
    "a recipe misspelt": (["train", "gsm9k"], ["no such file", "did you mean gsm8k?"]),
    "a reward as the config": (["train", "mine.py"], ["is a Python file", "custom_reward_function.path=mine.py"]),
    "tabs in a config": (["train", "tab.yaml"], ["line 2, column 1", "indent with spaces, not with tabs"]),
    "a csv file that is not UTF-8": (["train", "data.train_files=latin.csv"], ["is not UTF-8 (byte 0xf6)", "save it"]),
    "data as the model": (["eval", "rows.jsonl"], ["rows.jsonl: is a file; expected the folder of a model"]),
    "a row without its question": (["train", "--dry-run", "data.train_files=odd.csv"], ["odd.csv:2: field 'prompt'"]),
    "a run folder that is not one": (["branch", "empty", "new"], ["empty: is not a run folder"]),
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the commands name; wandb is installed, and nobody is logged in."""
    (tmp_path / "broken.jsonl").write_text("{'prompt': 1}\n")
    rows = [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def score(prompt, response):\n    return 1.0\n\n\ndef boom(prompt, response):\n    return 1 / 0\n"
    )
    (tmp_path / "tab.yaml").write_text("trainer:\n\ttotal_training_steps: 3\n")
    (tmp_path / "latin.csv").write_bytes("question,answer\nWas ist größer?,4\n".encode("latin-1"))
    (tmp_path / "odd.csv").write_text("x,y\n1,2\n")
    (tmp_path / "empty").mkdir()
    wandb = ModuleType("wandb")

    def init(**options):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: list[str]) -> str:
    """The error output of a command that must be refused without a traceback."""
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_clear_message(place, mistake):
    words, parts = MISTAKES[mistake]
    said = refused(words)
    assert all(part in said for part in parts), said
    errors = [line for line in said.splitlines() if line.startswith("error") or "No such command" in line]
    assert len(errors) <= 1
    assert not (place / "runs").exists() or not list((place / "runs").iterdir())


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
@pytest.mark.parametrize("command", [["train"], ["eval", "embedded", "--limit", "2"]])
def test_a_device_that_is_not_there(place, command, device):
    said = refused([*command, f"trainer.device={device}"])
    assert f"trainer.device={device}: torch" in said and "set trainer.device=auto" in said


def test_a_single_name_is_a_list_of_one(place):
    (place / "plugin.py").write_text("")
    result = CliRunner().invoke(app, ["config", "show", "trainer.plugins=plugin.py", "trainer.logger=wandb", "--diff"])
    assert result.exit_code == 0 and 'plugins: ["plugin.py"]' in result.stdout, result.output


def test_a_model_without_an_end_is_said(place, capsys):
    model = make_model(place / "model", eos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        file = place / "model" / name
        if file.exists():
            content = json.loads(file.read_text())
            content.pop("eos_token_id", None)
            content.pop("eos_token", None)
            file.write_text(json.dumps(content))
    words = [f"model.path={model}", "data.train_files=rows.jsonl", "reward.functions=[{name: exact}]", *SMALL]
    words += ["data.max_response_length=4", "data.max_prompt_length=24", "trainer.num_threads=1"]
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code == 0, result.output
    assert "the model has no end-of-sequence token" in result.output
    assert "alarm at step 1: no_gradient" in result.output  # a random model is never right
