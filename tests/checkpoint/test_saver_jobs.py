"""One save of a checkpoint: from which data, in which thread, when the next one is due, and what is removed after it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.saver import STAGE, CheckpointSaver, on_host
from gspo.config import TrainerConfig
from gspo.runs.clock import Clock
from tests.support import small_checkpoint


class Models:
    """One weight and one moment, which an update may change."""

    write_shards = None

    def __init__(self, *, saves_in_background: bool = True) -> None:
        self.saves_in_background = saves_in_background
        self.weight, self.moment = torch.tensor([1.0]), torch.tensor([2.0])
        self.threads: list[str] = []
        self.given: list[bool] = []

    def weights(self):
        return {"w": self.weight}

    def tensors(self):
        return {"optimizer": {"exp_avg/w": self.moment}}

    def save_model(self, folder: Path, weights=None) -> None:
        self.threads.append(threading.current_thread().name)
        self.given.append(weights is not None)
        (folder / "config.json").write_text("{}")
        save_file(self.weights() if weights is None else dict(weights), folder / "model.safetensors")


class Tokenizer:
    """A tokenizer with a file in a folder of its own."""

    num_saves = 0

    def save_pretrained(self, folder: str) -> None:
        self.num_saves += 1
        (Path(folder) / "more").mkdir()
        (Path(folder) / "more" / "words.txt").write_text(f"save {self.num_saves}")


@pytest.fixture
def writer():
    writer = BackgroundWriter(Clock(), print)
    yield writer
    writer.abandon()


def make_saver(folder: Path, writer: BackgroundWriter, every: int | str = 1, keep: int | None = None, **options):
    config = TrainerConfig()
    config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep = every, keep
    return CheckpointSaver(folder, config, Clock(), writer, **options)


def state() -> dict:
    return {**small_checkpoint.STATE, "counters": {"seconds": 3}}


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_holds_models_tokenizer_and_state_and_is_written_in_its_thread(tmp_path, writer, in_background):
    saver, tokenizer = make_saver(tmp_path, writer), Tokenizer()
    models = Models(saves_in_background=in_background)
    for step in (3, 4):
        saver.begin(step, models, tokenizer, state)
        writer.wait()
        assert saver.saved == step
    loaded = checkpoint.load(tmp_path / "step-000004")
    assert loaded.step == 4 and loaded.state["counters"] == {"seconds": 3}
    assert loaded.tensors["optimizer"]["exp_avg/w"].tolist() == [2.0]
    assert load_file(loaded.path / "model.safetensors")["w"].tolist() == [1.0]
    assert (loaded.path / "more" / "words.txt").read_text() == "save 1", "the tokenizer is read once"
    here = threading.current_thread().name
    assert models.threads == (["gspo-writer"] if in_background else [here]) * 2
    assert models.given == [in_background] * 2
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_step_counts_as_saved_only_when_it_is_on_disk(tmp_path, writer):
    saver, models, go = make_saver(tmp_path, writer), Models(), threading.Event()
    save_model = models.save_model
    models.save_model = lambda folder, weights: (go.wait(30), save_model(folder, weights))
    saver.begin(3, models, Tokenizer(), state)
    assert saver.saved is None
    go.set()
    writer.wait()
    assert saver.saved == 3

    def full(folder, weights):
        raise OSError(28, "No space left on device")

    models.save_model = full
    saver.begin(4, models, Tokenizer(), state)
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        writer.wait()
    assert saver.saved == 3


def test_the_state_is_that_of_the_step_boundary(tmp_path, writer):
    saver, models, go, counters = make_saver(tmp_path, writer), Models(), threading.Event(), {"seconds": 1}
    save_model = models.save_model
    models.save_model = lambda folder, weights: (go.wait(30), save_model(folder, weights))
    saver.begin(3, models, Tokenizer(), lambda: {**small_checkpoint.STATE, "counters": counters})
    counters["seconds"] = 99  # the next step has begun
    go.set()
    writer.wait()
    assert checkpoint.load(tmp_path / "step-000003").state["counters"] == {"seconds": 1}


def test_old_checkpoints_go_after_a_save_and_the_best_of_those_on_disk_stay(tmp_path, writer):
    asked = []

    def best(steps):
        asked.append(list(steps))
        return [2]

    saver = make_saver(tmp_path, writer, keep=2, best=best)
    (tmp_path / "step-000009").mkdir()  # damaged: the run goes on from an earlier one
    for step in (2, 4, 6, 8):
        saver.begin(step, Models(), Tokenizer(), state)
        writer.wait()
    assert [p.name for p in checkpoint.all_steps(tmp_path)] == [f"step-{step:06d}" for step in (2, 6, 8, 9)]
    assert asked == [[2, 9], [2, 4, 9], [2, 4, 6, 9], [2, 4, 6, 8, 9]]


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, []), (0, []), (-1, []), (-2, [])])
def test_a_checkpoint_is_due_every_so_many_steps(tmp_path, writer, every, due):
    saver = make_saver(tmp_path, writer, every)
    assert [step for step in range(1, 7) if saver.is_due(step)] == due


def test_auto_counts_from_the_last_save_and_by_its_cost_alone(tmp_path, writer, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("gspo.checkpoint.saver.time.monotonic", lambda: now[0])
    saver = make_saver(tmp_path, writer, "auto")

    def slow_state():
        now[0] += 2.0  # the part of a save that the main thread does
        return state()

    writer.charge(STAGE, 50.0)  # of earlier saves
    now[0] = 2000.0
    saver.begin(1, Models(), Tokenizer(), slow_state)
    writer.wait()
    cost = writer.cost[STAGE] - 50.0
    assert cost >= 2.0
    for seconds, due in ((cost * 19, False), (cost * 21, True)):
        now[0] = 2000.0 + seconds
        assert saver.is_due(2) is due


def test_a_run_that_resumes_has_saved_the_step_only_in_its_own_folder(tmp_path, writer):
    own, other = tmp_path / "own", tmp_path / "other"
    saver = make_saver(own, writer)
    assert saver.saved is None
    saver.resumed(checkpoint.load(small_checkpoint.save(own, 3)))
    assert saver.saved == 3
    saver.resumed(checkpoint.load(small_checkpoint.save(other, 3)))
    assert saver.saved is None
    (tmp_path / "link").symlink_to(own)
    saver.resumed(checkpoint.load(tmp_path / "link" / "step-000003"))
    assert saver.saved == 3
    saver.resumed(None)
    assert saver.saved is None


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device and whose copies are counted."""

    device = torch.device("cuda")
    num_copies = 0

    def cpu(self):
        OnDevice.num_copies += 1
        return self.as_subclass(torch.Tensor).clone()


def test_tensors_of_a_device_are_copied_once_and_tied_ones_stay_tied(monkeypatch):
    monkeypatch.setattr(OnDevice, "num_copies", 0)
    kept, tied = torch.tensor([1.0]), torch.arange(4.0).as_subclass(OnDevice)
    other, view = torch.arange(4.0).as_subclass(OnDevice), tied[:2]
    got = on_host({"kept": kept, "a": tied, "b": tied, "c": other, "d": view})
    assert got["kept"] is kept and got["a"] is got["b"] and got["a"] is not got["c"]
    assert got["a"].tolist() == [0.0, 1.0, 2.0, 3.0] and got["d"].tolist() == [0.0, 1.0]
    assert OnDevice.num_copies == 3 and list(got) == ["kept", "a", "b", "c", "d"]


def test_the_state_text_has_the_format_and_the_step():
    assert json.loads(checkpoint.state_text(7, {"config": {"a": 1}})) == {"format": 1, "step": 7, "config": {"a": 1}}
