"""Runs of `gspo sft`: what they learn and leave, evaluation, resume to the bit, adapters, and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from gspo.checkpoint.resume import ResumeRefused
from gspo.commands.supervised.sft import app
from gspo.data.rows import DataError, Row, user_message
from gspo.models.load import load_model, load_tokenizer
from tests.loop.runs import train as train_by_rewards
from tests.loop.supervised_runs import LORA, SMALL, train, trainer
from tests.support.preloaded import preloaded_python
from tests.support.small_run import final_state, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> Path:
    """A run of four steps without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, model)
    return folder


def test_a_run_leaves_metrics_checkpoints_and_a_result(whole, model):
    run = whole / "run"
    names = ("config.yaml", "config.json", "environment.json", "result.json", "metrics.jsonl")
    assert all((run / name).is_file() for name in names)
    steps = rows(whole)
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    assert all(row["train/loss"] > 0 and row["actor/grad_norm"] > 0 for row in steps[1:])
    assert {"val/loss", "val/perplexity"} <= set(steps[0]) and "val/loss" in steps[4] and "val/loss" not in steps[2]
    assert steps[1]["train/tokens"] > steps[1]["train/answer_tokens"] > 0
    assert steps[4]["train/epoch"] == 0.5
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["num_examples"], result["skipped_steps"]) == (4, 64, 0)
    assert result["start_val_loss"] == steps[0]["val/loss"] and result["val_loss"] == steps[4]["val/loss"]
    assert result["first_loss"] == result["last_loss"] == sum(row["train/loss"] for row in steps[1:]) / 4
    assert result["out"] == str(run / "checkpoints" / "step-000004")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert load_model(result["out"]).config.hidden_size == 32


def test_it_learns(tmp_path, model):
    data = [Row(str(i), user_message(f"{i}?"), answer="yes" if i % 2 else "no") for i in range(8)]
    steps = ("trainer.total_training_steps=80", "trainer.save_freq=-1")
    result = train(tmp_path, model, *steps, train_dataset=data, val_dataset=data, out=tmp_path / "out")
    assert result["first_loss"] > 1.0 > 0.1 > result["last_loss"]
    assert result["val_loss"] < 0.1 < result["start_val_loss"]
    tokenizer, trained = load_tokenizer(str(tmp_path / "out")), load_model(str(tmp_path / "out"))
    ids = tokenizer("<user>3?<assistant>", return_tensors="pt")["input_ids"]
    out = trained.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(out[0]) == "<user>3?<assistant>yes<eos>"


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, model, whole, stop_after):
    result = train(tmp_path, model, stop_after=stop_after)
    assert (result["stopped"], result["steps"]) == (143, stop_after)
    assert train(tmp_path, model)["steps"] == 4
    assert final_state(tmp_path / "run") == final_state(whole / "run")


def test_the_token_budget_changes_no_more_than_rounding(tmp_path, model, whole):
    train(tmp_path, model, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40")
    for one, other in zip(rows(tmp_path)[1:], rows(whole)[1:]):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-3)


def test_adapters_train_alone_resume_and_are_merged(tmp_path, model):
    train(tmp_path / "whole", model, *LORA)
    train(tmp_path / "cut", model, *LORA, stop_after=2)
    train(tmp_path / "cut", model, *LORA)
    assert final_state(tmp_path / "cut" / "run") == final_state(tmp_path / "whole" / "run")
    start, end = load_model(str(model)), load_model(str(tmp_path / "whole" / "run" / "checkpoints" / "step-000004"))
    moved = {n for n, p in start.named_parameters() if not torch.equal(p, end.get_parameter(n))}
    assert moved and all("proj" in name for name in moved)


def test_in_bfloat16_the_masters_stay_float32_and_a_run_resumes(tmp_path, model):
    low = "actor_rollout_ref.model.dtype=bfloat16"
    train(tmp_path / "whole", model, low)
    train(tmp_path / "cut", model, low, stop_after=2)
    train(tmp_path / "cut", model, low)
    assert final_state(tmp_path / "cut" / "run") == final_state(tmp_path / "whole" / "run")
    state = load_file(tmp_path / "whole" / "run" / "checkpoints" / "step-000004" / "training" / "optimizer.safetensors")
    masters = [t for name, t in state.items() if name.startswith("master/")]
    assert masters and all(t.dtype == torch.float32 for t in masters)


def test_schedule_decay_and_clipping_are_the_keys_of_gspo_train(tmp_path, model):
    optim = "actor_rollout_ref.actor.optim"
    words = ("trainer.total_training_steps=6", f"{optim}.lr_warmup_steps=2", f"{optim}.min_lr_ratio=0.5")
    train(tmp_path, model, *words, "actor_rollout_ref.actor.grad_clip=1e-3")
    rates = [row["actor/lr"] for row in rows(tmp_path)[1:]]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert rates[2] > rates[3] > rates[4] > rates[5] > 5e-3


def test_evaluation_every_few_steps_and_accuracy(tmp_path, model):
    words = (
        "trainer.test_freq=2",
        "trainer.val_accuracy=true",
        "data.max_response_length=6",
        "data.max_prompt_length=24",
    )
    train(tmp_path, model, *words)
    steps = rows(tmp_path)
    assert [row["step"] for row in steps if "val/loss" in row] == [0, 2, 4]
    accuracy = [row["val-core/arithmetic/acc/mean@1"] for row in steps if "val/loss" in row]
    assert len(accuracy) == 3 and all(0 <= a <= 1 for a in accuracy)
    assert len(list((tmp_path / "run" / "evals").glob("*.gz"))) == 3
    with_answers = [row["train/loss"] for row in steps[1:]]
    train(tmp_path / "without", model)
    assert [row["train/loss"] for row in rows(tmp_path / "without")[1:]] == with_answers


def test_long_examples_are_left_out_cut_or_refused_by_the_keys_of_prompts(tmp_path, model):
    data = [Row(f"r{i}", user_message("a"), answer="b" * 4 * i) for i in range(1, 9)]
    t = trainer(tmp_path / "out", model, "data.max_length=20", train_dataset=data)
    assert len(t.parts.order.examples) == 4
    assert "4 examples are longer than data.max_length=20 tokens and are left out" in t.parts.summary(tmp_path, 4)
    t.close()
    words = ("data.max_length=20", "data.filter_overlong_prompts=false")
    t = trainer(tmp_path / "cut", model, *words, "data.truncation=right", train_dataset=data)
    assert [e.num_tokens for e in t.parts.order.examples] == [8, 12, 16, 20, 20, 20, 20, 20]
    t.close()
    with pytest.raises(DataError, match=r"r5: field 'answer' is 24 tokens with its prompt.*data\.max_length=20"):
        trainer(tmp_path / "error", model, *words, train_dataset=data)


def test_examples_beyond_the_positions_of_the_model_are_named(tmp_path, model):
    data = [Row(f"r{i}", user_message("a"), answer="b" * 60 * i) for i in range(1, 4)]
    with pytest.raises(DataError, match=r"r3: is 184 tokens.*max_position_embeddings=128.*data\.max_length"):
        trainer(tmp_path, model, train_dataset=data)


def test_checkpoints_of_another_kind_of_run_are_refused(tmp_path, model, whole):
    with pytest.raises(ResumeRefused):
        train_by_rewards(whole, model)
    train_by_rewards(tmp_path, model, "trainer.total_training_steps=1")
    with pytest.raises(ResumeRefused):
        train(tmp_path, model)


def test_other_data_is_refused_on_resume(tmp_path, model):
    data = [Row(f"r{i}", user_message("a"), answer=str(i)) for i in range(8)]
    train(tmp_path, model, stop_after=1, train_dataset=data)
    with pytest.raises(ResumeRefused, match="training data"):
        train(tmp_path, model, train_dataset=data[::-1])


def command(folder: Path, model: Path, *words: str) -> list[str]:
    paths = (f"trainer.default_local_dir={folder}", "--model", str(model), "--out", str(folder / "out"))
    return [*SMALL, *paths, "--device", "cpu", *words]


def test_the_command_trains_any_file_with_answers_and_saves_a_loadable_folder(tmp_path, model):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"q": f"{i}+1=", "a": str(i + 1)}) + "\n" for i in range(8)))
    words = command(tmp_path, model, "--data", str(file), "--prompt-key", "q", "--answer-key", "a", "--steps", "3")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1].removeprefix("result: "))
    assert (summary["steps"], summary["num_examples"], summary["skipped_steps"]) == (4, 8, 0)
    assert not (tmp_path / "out" / "training").exists() and not (tmp_path / "out" / "MANIFEST.json").exists()
    trained, start = load_model(str(tmp_path / "out")), load_model(str(model))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters()))
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "not an empty folder" in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nope"], "is not a dataset"),
        (["--model", "no_such_folder_or/name/x"], "there is no such folder"),
        (["--dtype", "int8"], "expected one of auto, float32, bfloat16"),
        (["--lr", "-1"], "expected a number of at least 0"),
        (["data.max_length=3"], "left no example"),
        (["data.val_files=nope"], "is not a dataset"),
        (["actor_rollout_ref.actor.optim.lrr=1"], "did you mean"),
        (["extra"], "no such file"),
    ],
)
def test_bad_words_end_with_2_and_leave_nothing(tmp_path, words, message):
    start = ["--steps", "1", "--num-train-samples", "4", f"trainer.default_local_dir={tmp_path / 'runs'}"]
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "o"), *start, *words])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "o").exists() and not list((tmp_path / "runs").glob("*"))


def test_a_held_out_file_without_answers_is_refused(tmp_path, model):
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    result = CliRunner().invoke(app, command(tmp_path, model, "--val-data", str(file)))
    assert result.exit_code == 2
    assert "held_out.jsonl:1: field 'answer' is missing" in result.output


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


LONG = ("trainer.total_training_steps=30", "trainer.save_freq=3")


@pytest.fixture(scope="module")
def long(tmp_path_factory, model) -> Path:
    """A run of thirty steps without interruption."""
    folder = tmp_path_factory.mktemp("long")
    train(folder, model, *LONG)
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_killed_program_goes_on_to_the_same_bits(tmp_path, model, long, number, code):
    words = [preloaded_python(), "-m", "gspo", "sft", *command(tmp_path, model, *LONG)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 8/30"):
            process.send_signal(number)
            break
    process.stdout.read()
    assert process.wait() == code
    assert not (tmp_path / "out").exists()
    saved = sorted(int(p.name.removeprefix("step-")) for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(saved) == 2 and 6 <= saved[-1] < 30
    assert number == signal.SIGTERM or saved[-1] % 3 == 0  # SIGTERM saves the step that it ends with
    subprocess.run(words, check=True, env=ENVIRONMENT, capture_output=True)
    assert final_state(tmp_path / "run") == final_state(long / "run")
    weights = [folder / "model.safetensors" for folder in (tmp_path / "out", long / "run/checkpoints/step-000030")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (tmp_path / "run" / "report.html").is_file()
