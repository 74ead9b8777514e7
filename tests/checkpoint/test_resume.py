"""A run that was stopped and resumed is the run that was never stopped, to the bit."""

from __future__ import annotations

import shutil

import pytest

from gspo.checkpoint.folder import CheckpointError
from gspo.checkpoint.resume import ResumeRefused
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from gspo.runs.folder import RunLocked
from tests.loop.runs import rows, train
from tests.support.small_run import config, even_first_byte, final_state, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """A run of four steps without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    result = train(folder, model)
    assert result["steps"] == 4
    return final_state(folder / "run")


def test_the_same_seed_gives_the_same_bits_twice(tmp_path, model, whole):
    train(tmp_path, model)
    assert final_state(tmp_path / "run") == whole


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, model, whole, stop_after):
    result = train(tmp_path, model, stop_after=stop_after)
    assert (result["stopped"], result["steps"]) == (143, stop_after)
    assert train(tmp_path, model)["steps"] == 4
    assert final_state(tmp_path / "run") == whole


def test_rows_after_the_checkpoint_are_cut_and_written_again(tmp_path, model, whole):
    train(tmp_path, model, "trainer.max_actor_ckpt_to_keep=null")
    for step in (3, 4):  # as if killed before these were saved
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    (tmp_path / "run" / "result.json").unlink()
    with open(tmp_path / "run" / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "half')
    train(tmp_path, model, "trainer.max_actor_ckpt_to_keep=null")
    assert final_state(tmp_path / "run") == whole


def test_another_seed_gives_other_bits(tmp_path, model, whole):
    train(tmp_path, model, "trainer.seed=1")
    assert final_state(tmp_path / "run")["weights"] != whole["weights"]


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("trainer.seed=3", "trainer.seed"),
        ("actor_rollout_ref.rollout.n=2", "rollout.n"),
        ("data.num_train_samples=32", "num_train_samples"),
        ("trainer.num_threads=2", "num_threads"),
    ],
)
def test_a_resume_that_would_compute_something_else_is_refused(tmp_path, model, override, name):
    train(tmp_path, model, stop_after=1)
    before = final_state(tmp_path / "run")
    with pytest.raises(ResumeRefused, match=name):
        train(tmp_path, model, override)
    assert final_state(tmp_path / "run") == before


def test_a_checkpoint_given_by_path_is_compared_too(tmp_path, model):
    train(tmp_path, model, stop_after=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    with pytest.raises(ResumeRefused, match=r"trainer\.seed"):
        train(tmp_path, model, f"trainer.resume_mode={checkpoint}", "trainer.seed=5")


def test_a_run_that_continues_another_folders_checkpoint_saves_its_own(tmp_path, model):
    train(tmp_path, model, stop_after=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    words = ("trainer.experiment_name=other", "trainer.total_training_steps=1")
    assert train(tmp_path, model, f"trainer.resume_mode={checkpoint}", *words)["steps"] == 1
    assert (tmp_path / "other" / "checkpoints" / "step-000001" / "MANIFEST.json").is_file()


def test_other_rows_under_the_same_names_are_refused(tmp_path, model):
    """The fingerprint of the data holds tokens and truths, not only the names of rows."""

    def rows(truth: str, question: str = "1+1=") -> list[dict]:
        return [{"prompt": f"{i}:{question}", "ground_truth": truth} for i in range(16)]

    def start(data: list[dict]) -> dict:
        resolved = config(tmp_path, model, "data.num_train_samples=null", "data.val_files=null")
        return Trainer(resolved, even_first_byte, train_dataset=data, console=Console(enabled=False)).fit()

    start(rows("2"))
    for other in (rows("3"), rows("2", "1+2=")):
        with pytest.raises(ResumeRefused, match="training data"):
            start(other)


def test_a_finished_run_goes_on_with_the_rates_of_a_longer_one(tmp_path, model, capsys):
    cosine = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    six = (cosine, "trainer.total_training_steps=6")
    train(tmp_path / "longer", model, cosine)
    assert (tmp_path / "longer" / "run" / "result.json").exists()
    resolved = config(tmp_path / "longer", model, *six)
    assert Trainer(resolved, even_first_byte).fit()["steps"] == 6
    assert "the learning-rate schedule ends at step 6, not 4" in capsys.readouterr().out
    train(tmp_path / "whole", model, *six)
    rates = [[row["actor/lr"] for row in rows(tmp_path / name)] for name in ("longer", "whole")]
    assert len(rates[0]) == 6 and rates[0][4:] == rates[1][4:] and rates[0][:4] != rates[1][:4]
    # Stopped again after it was made longer, it goes on to the same bits.
    train(tmp_path / "cut", model, cosine)
    train(tmp_path / "cut", model, *six, stop_after=5)
    train(tmp_path / "cut", model, *six)
    assert final_state(tmp_path / "cut" / "run") == final_state(tmp_path / "longer" / "run")


def test_a_model_of_another_shape_is_refused(tmp_path, model):
    train(tmp_path / "runs", model, stop_after=1)
    other = make_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(ResumeRefused, match=r"model\.path"):
        train(tmp_path / "runs", other)


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path, model, whole, capsys):
    train(tmp_path, model, stop_after=2)
    weights = tmp_path / "run" / "checkpoints" / "step-000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    trainer = Trainer(config(tmp_path, model), reward_fn=even_first_byte)
    assert trainer.step == 1
    said = capsys.readouterr().out
    assert "DAMAGED" in said and "step-000002" in said and "SHA-256" in said
    trainer.fit()
    assert final_state(tmp_path / "run") == whole


def test_no_intact_checkpoint_is_an_error_not_a_start_from_step_0(tmp_path, model):
    train(tmp_path, model, stop_after=1)
    (tmp_path / "run" / "checkpoints" / "step-000001" / "training" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        train(tmp_path, model)


def test_a_second_process_on_a_run_folder_is_refused(tmp_path, model):
    trainer = Trainer(config(tmp_path, model), reward_fn=even_first_byte, console=Console(enabled=False))
    with pytest.raises(RunLocked, match="in use by process"):
        train(tmp_path, model)
    trainer.close()
    train(tmp_path, model, stop_after=1)


def test_a_finished_run_says_its_result_again(tmp_path, model):
    first = train(tmp_path, model)
    assert train(tmp_path, model) == first
    longer = train(tmp_path, model, "trainer.total_training_steps=5")
    assert longer["steps"] == 5


def test_an_unnamed_run_goes_on_when_unfinished_and_else_gets_a_new_number(tmp_path, model):
    unnamed = "trainer.experiment_name=null"
    assert train(tmp_path, model, unnamed, stop_after=1)["run"].endswith("-001")
    assert train(tmp_path, model, unnamed)["run"].endswith("-001")
    assert train(tmp_path, model, unnamed, stop_after=1)["run"].endswith("-002")
    assert train(tmp_path, model, unnamed, "trainer.seed=5", stop_after=1)["run"].endswith("-003")


def test_starting_anew_keeps_the_earlier_run(tmp_path, model):
    train(tmp_path, model, stop_after=1)
    train(tmp_path, model, "trainer.resume_mode=disable", stop_after=1)
    assert (tmp_path / "run.old-001" / "metrics.jsonl").exists()
