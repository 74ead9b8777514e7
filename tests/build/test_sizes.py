"""Sizes that nobody set follow the rows, the device and the memory; those that somebody set stay, or are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.build import sizes
from gspo.build.sizes import NotEnoughMemory, decide_sizes
from gspo.cli import app
from gspo.config import ResolvedConfig, load
from gspo.exit_codes import EXIT_REFUSED
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.support.small_run import even_first_byte, final_state, make_model

MIB = 1 << 20
TOKENS, SLOTS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.max_num_seqs"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "eight.jsonl"
    lines = [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n), "data_source": "arithmetic"} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def words(model: Path, rows: Path, *more: str) -> list[str]:
    return [f"actor_rollout_ref.model.path={model}", f"data.train_files={rows}", "trainer.device=cpu", *more]


def decided(model: Path, rows: Path, *more: str) -> sizes.Sizes:
    return decide_sizes(load(None, words(model, rows, *more)))


def limit_memory(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(sizes, "machine_memory", lambda device: num_bytes)
    monkeypatch.setattr(sizes, "held_memory", lambda: 0)


def test_a_batch_has_as_many_groups_as_the_data_has_rows(model, rows):
    found = decided(model, rows)
    assert found.resolved.config.data.train_batch_size == 8
    assert found.resolved.config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    assert found.notes == ["data.train_batch_size=8 (mini-batches of 2), not 1024: the training data has 8 rows"]
    assert found.resolved.origin("data.train_batch_size") == "auto: the training data has 8 rows"


def test_rows_given_in_python_count_as_well(model, rows):
    assert (
        decide_sizes(
            load(None, words(model, rows)), [{"prompt": "1+1=", "ground_truth": "2"}] * 3
        ).resolved.config.data.train_batch_size
        == 3
    )


def test_the_limit_of_a_recipe_gives_way_to_the_users_longer_rows(rows):
    embedded = [f"data.train_files={rows}", "trainer.device=cpu"]
    assert decide_sizes(load(None, embedded)).resolved.config.data.max_prompt_length == 32
    long = [{"prompt": "x" * length, "ground_truth": ""} for length in (5, 40, 90)]
    found = decide_sizes(load(None, ["trainer.device=cpu"]), long)
    assert found.resolved.config.data.max_prompt_length == 92
    assert found.resolved.origin("data.max_prompt_length").startswith("auto: ")
    reason = "the longest prompt of the training data has 92 tokens"
    assert f"data.max_prompt_length=92, not 32 as in the recipe embedded: {reason}" in found.notes
    endless = [{"prompt": "x" * 600, "ground_truth": ""}]
    assert decide_sizes(load(None, embedded), endless).resolved.config.data.max_prompt_length == 512
    turns = load(None, [*embedded, "actor_rollout_ref.rollout.multi_turn.enable=true"])
    assert decide_sizes(turns, endless, environment=[len]).resolved.config.data.max_prompt_length == 32
    named = load(None, [*embedded, "data.max_prompt_length=48"])
    assert decide_sizes(named, long).resolved.config.data.max_prompt_length == 48


def test_rows_that_are_left_out_are_said(model, tmp_path):
    rows = [{"prompt": "x" * length, "ground_truth": ""} for length in (5, 40, 90)]
    sizes_of_run = ["data.max_prompt_length=60", "data.max_response_length=4", "rollout.n=2", "trainer.num_threads=1"]
    resolved = load(None, [f"model.path={model}", *sizes_of_run, f"trainer.default_local_dir={tmp_path}"])
    trainer = Trainer(resolved, even_first_byte, rows, val_dataset=rows[2:] + rows[:1], console=Console(enabled=False))
    with contextlib.closing(trainer):
        notes, size = trainer.parts.notes, trainer.config.data.train_batch_size
    assert size == 2  # what is left out does not count
    remedy = "are longer than data.max_prompt_length=60 tokens and are left out; to keep them, set"
    assert notes == [
        f"training data: 1 of 3 rows {remedy} data.max_prompt_length=92",
        f"held-out data: 1 of 2 rows {remedy} data.max_prompt_length=92",
    ]


def test_without_a_gpu_a_batch_is_small(model, rows):
    assert decided(model, rows, "data.train_files=arithmetic").resolved.config.data.train_batch_size == sizes.CPU_BATCH


def test_a_size_that_was_set_stays_and_too_few_rows_are_said(model, rows):
    found = decided(model, rows, "data.train_batch_size=16", "trainer.total_training_steps=2")
    assert found.resolved.config.data.train_batch_size == 16 and not found.notes
    assert "more than the 8 rows" in found.warnings[0]


def test_auto_undoes_what_a_file_sets(model, rows, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_batch_size: 16}\n")
    resolved = load(path, words(model, rows, "data.train_batch_size=auto"))
    assert decide_sizes(resolved).resolved.config.data.train_batch_size == 8


def test_sizes_shrink_until_the_run_fits_into_memory(model, rows, monkeypatch):
    free = decided(model, rows)
    assert free.memory is not None and free.memory.fits
    limit_memory(monkeypatch, int(free.memory.memory.total / 2))
    found = decided(model, rows)
    assert found.memory is not None and found.memory.fits
    assert found.resolved.get(TOKENS) < 16384 or found.resolved.get(SLOTS) < 1024
    assert "the defaults need" in found.notes[-1] and "MiB of memory" in found.notes[-1]


def test_what_cannot_fit_is_refused_or_said(model, rows, monkeypatch):
    limit_memory(monkeypatch, MIB)
    with pytest.raises(NotEnoughMemory, match=r"needs .* but only 1\.0 MiB are available; the largest part is"):
        decided(model, rows)
    assert "only 1.0 MiB" in decided(model, rows, "trainer.memory_check=warn").warnings[0]
    assert decided(model, rows, "trainer.memory_check=off").memory is None


def test_a_size_that_was_set_is_not_lowered(model, rows, monkeypatch):
    free = decided(model, rows).memory
    assert free is not None
    limit_memory(monkeypatch, int(free.memory.total * 0.9))
    set_all = [f"{TOKENS}=16384", f"{SLOTS}=1024", "rollout.max_num_batched_tokens=8192"]
    with pytest.raises(NotEnoughMemory):
        decided(model, rows, *set_all, "model.enable_gradient_checkpointing=false")


def test_the_dry_run_checks_the_memory_too(model, rows, monkeypatch):
    result = CliRunner().invoke(app, ["train", "--dry-run", *words(model, rows)])
    assert result.exit_code == 0, result.output
    assert "prompts per step           8\n" in result.stdout and "  memory  " in result.stdout
    assert "data.train_batch_size=8" in result.stdout
    limit_memory(monkeypatch, MIB)
    result = CliRunner().invoke(app, ["train", "--dry-run", *words(model, rows)])
    assert result.exit_code == EXIT_REFUSED and "error: memory: " in result.stderr


def test_a_run_goes_on_with_the_sizes_it_began_with(model, rows, tmp_path, monkeypatch):
    def resolved(folder: str, steps: int) -> ResolvedConfig:
        sizes_and_lengths = ["data.max_response_length=6", "data.max_prompt_length=24", "rollout.n=4"]
        run = [f"trainer.default_local_dir={tmp_path / folder}", "trainer.experiment_name=run", "trainer.num_threads=1"]
        return load(
            None, words(model, rows, *sizes_and_lengths, *run, f"trainer.total_training_steps={steps}", "optim.lr=1e-3")
        )

    def train(folder: str, steps: int) -> None:
        Trainer(resolved(folder, steps), even_first_byte, console=Console(enabled=False)).fit()

    train("whole", 3)
    train("cut", 2)
    monkeypatch.setattr(sizes, "CPU_BATCH", 4)  # another machine would choose another batch
    train("cut", 3)
    assert final_state(tmp_path / "whole" / "run") == final_state(tmp_path / "cut" / "run")
