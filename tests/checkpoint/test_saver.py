"""Checkpoints written while the next batch is generated: in order, with the same bits, and after failures."""

from __future__ import annotations

import functools
import gc
import hashlib
import signal
import subprocess
import threading
import weakref

import pytest
import torch

import gspo.loop.trainer as module
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.folder import CheckpointError
from gspo.checkpoint.saver import STAGE, CheckpointSaver
from gspo.config import TrainerConfig
from gspo.distributed.rank_roles import RankRoles
from gspo.loop.guards.alarms import RULES
from gspo.loop.run import exit_code
from gspo.runs.clock import Clock
from gspo.runs.group_log import GroupLog
from gspo.training.roles import LocalRoles
from tests.checkpoint.test_background_writer import until
from tests.loop.runs import rows, train, trainer
from tests.support.preloaded import preloaded_python
from tests.support.small_run import final_state, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """The final state of a run whose checkpoints are written at once, and the digest of each file of the last one."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRoles, "saves_in_background", False)
        train(folder, model)
    return final_state(folder / "run"), digests(folder)


OWN = ("state.json", "MANIFEST.json", "README.md")


def digests(folder) -> dict[str, str]:
    """SHA-256 of each file of the last checkpoint that says the same in every run. Its card tells when and how long."""
    last = folder / "run" / "checkpoints" / "step-000004"
    files = [p for p in last.rglob("*") if p.is_file() and p.name not in OWN]
    return {str(p.relative_to(last)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def with_hook(monkeypatch, hook) -> None:
    monkeypatch.setattr(checkpoint, "save", functools.partial(checkpoint.save, hook=hook))


def watch(t, events) -> None:
    """Note when a run generates and when it updates, with the number of the step."""
    next_batch, update = t.parts.sampler.next_batch, t.parts.policy.optimizer.step

    def generate():
        batch = next_batch()
        events.append(("generates", t.step + 1))
        return batch

    def train_on(*args, **kwargs):
        events.append(("updates", t.step + 1))
        return update(*args, **kwargs)

    t.parts.sampler.next_batch, t.parts.policy.optimizer.step = generate, train_on


def test_a_slow_save_goes_on_while_the_next_batch_is_generated_and_the_update_waits(
    tmp_path, model, whole, monkeypatch
):
    events = []
    t = trainer(tmp_path, model)
    watch(t, events)

    def hook(point):
        if point == "save:model":
            events.append(("saves", t.step))
            until(lambda: t.clock.stage == STAGE)  # the loop has come to where it cannot go on
        if point == "save:renamed":
            events.append(("saved", t.step))

    with_hook(monkeypatch, hook)
    t.fit()
    order = list(dict.fromkeys(events))
    for step in (1, 2, 3):
        saves, generates, saved, updates = (
            order.index(event)
            for event in (("saves", step), ("generates", step + 1), ("saved", step), ("updates", step + 1))
        )
        assert max(saves, generates) < saved < updates
    assert (final_state(tmp_path / "run"), digests(tmp_path)) == whole
    waited = [row.get(f"timing_s/{STAGE}", 0.0) for row in rows(tmp_path)]
    assert waited[0] == 0 and all(seconds > 0 for seconds in waited[1:])


def test_where_saving_changes_the_models_everything_waits_for_it(tmp_path, model, monkeypatch):
    events = []
    t = trainer(tmp_path, model, "actor_rollout_ref.model.lora_rank=2")
    assert not t.parts.roles.saves_in_background and not RankRoles.saves_in_background
    watch(t, events)
    threads = set()

    def hook(point):
        threads.add(threading.current_thread().name)
        if point == "save:renamed":
            events.append(("saved", t.step))

    with_hook(monkeypatch, hook)
    t.fit()
    order = list(dict.fromkeys(events))
    assert threads == {threading.current_thread().name}
    assert all(order.index(("saved", s)) < order.index(("generates", s + 1)) for s in (1, 2, 3))


def fails_at(point: str, count: int):
    left = [count]

    def hook(name):
        if name == point:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(28, "No space left on device")

    return hook


def test_a_save_that_fails_ends_the_run_before_another_update(tmp_path, model, whole, monkeypatch):
    events = []
    t = trainer(tmp_path, model)
    watch(t, events)
    with monkeypatch.context() as patch:
        with_hook(patch, fails_at("save:optimizer", 2))
        with pytest.raises(CheckpointError, match="earlier checkpoints are untouched") as raised:
            t.fit()
    assert exit_code(raised.value) == 6 and isinstance(raised.value.__cause__, OSError)
    assert ("updates", 3) not in events and ("generates", 3) in events
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step-000001"]
    assert checkpoint.verify(folder / "step-000001") is None
    train(tmp_path, model)
    assert final_state(tmp_path / "run") == whole[0]


def test_the_last_save_that_fails_is_no_end(tmp_path, model, monkeypatch):
    t = trainer(tmp_path, model)
    with_hook(monkeypatch, fails_at("save:manifest", 4))
    with pytest.raises(CheckpointError):
        t.fit()
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_stop_whose_save_fails_says_so_and_not_that_it_is_saved(tmp_path, model, monkeypatch):
    with_hook(monkeypatch, fails_at("save:manifest", 2))
    with pytest.raises(CheckpointError):
        train(tmp_path, model, stop_after=2)


def test_groups_that_cannot_be_written_leave_no_checkpoint_of_their_step(tmp_path, model, whole, monkeypatch):
    write = GroupLog.write

    def full(self, step, *args):
        if step == 2:
            raise OSError(28, "No space left on device")
        write(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(GroupLog, "write", full)
        with pytest.raises(OSError, match="No space left") as raised:
            train(tmp_path, model)
    assert exit_code(raised.value) == 6
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    train(tmp_path, model)
    assert final_state(tmp_path / "run") == whole[0]


KILLED = """
import functools, os, signal, sys
from pathlib import Path
from gspo.checkpoint import folder as checkpoint
from tests.loop.runs import trainer
from tests.checkpoint.test_background_writer import until

t = trainer(Path(sys.argv[1]), Path(sys.argv[2]))
steps, next_batch = [], t.parts.sampler.next_batch

def generate():
    steps.append(t.step)
    return next_batch()

def hook(point):
    if point == sys.argv[3] and t.step == 3:
        until(lambda: steps[-1] == 3)
        os.kill(os.getpid(), signal.SIGKILL)

t.parts.sampler.next_batch = generate
checkpoint.save = functools.partial(checkpoint.save, hook=hook)
t.fit()
"""


@pytest.mark.parametrize(("point", "newest"), [("save:optimizer", 2), ("save:renamed", 3)])
def test_a_kill_while_one_step_is_saved_and_the_next_generated_loses_one_step_at_most(
    tmp_path, model, whole, point, newest
):
    command = [preloaded_python(), "-c", KILLED, str(tmp_path), str(model), point]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    path, damaged = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert path is not None and path.name == f"step-{newest:06d}" and not damaged
    train(tmp_path, model)
    assert (final_state(tmp_path / "run"), digests(tmp_path)) == whole


def test_a_damaged_checkpoint_of_the_step_reached_is_written_again(tmp_path, model):
    train(tmp_path, model, stop_after=2)
    newest = tmp_path / "run" / "checkpoints" / "step-000002"
    (newest / "config.json").write_text("{}")
    assert train(tmp_path, model, "trainer.save_freq=-1", stop_after=2)["steps"] == 2
    assert checkpoint.verify(newest) is None


def test_checkpoints_that_a_run_did_not_go_on_from_do_not_count_as_kept(tmp_path):
    for step in (2, 3, 4, 8, 9):
        (tmp_path / f"step-{step:06d}").mkdir()
    checkpoint.prune(tmp_path, 2, newest=4)
    assert [p.name for p in checkpoint.all_steps(tmp_path)] == [f"step-{s:06d}" for s in (3, 4, 8, 9)]


def test_auto_saves_while_it_costs_little(tmp_path):
    clock = Clock()
    writer = BackgroundWriter(clock, print)
    saving = CheckpointSaver(tmp_path, TrainerConfig(), clock, writer)
    assert saving.is_due(1)
    writer.charge("log_groups", 1e9)
    assert saving.is_due(1)
    writer.charge(STAGE, 1e9)
    assert not saving.is_due(1)


def test_auto_waits_twenty_times_as_long_as_the_last_save_cost(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("gspo.checkpoint.saver.time.monotonic", lambda: now[0])
    clock = Clock()
    writer = BackgroundWriter(clock, print)
    saving = CheckpointSaver(tmp_path, TrainerConfig(), clock, writer)
    writer.charge(STAGE, 3.0)
    due = []
    for now[0] in (1001.0, 1059.0, 1061.0):
        due.append(saving.is_due(1))
    assert due == [False, False, True]  # 5 % of the time since then is 3 s


def test_a_rollback_lets_the_old_models_go_before_new_ones_are_built(tmp_path, model, monkeypatch):
    monkeypatch.setitem(RULES, "made", lambda history: "x" if history[-1]["step"] == 2 else None)
    t = trainer(tmp_path, model, "trainer.on_alarm=rollback")
    old, left, build = weakref.ref(t.parts.policy.model), [], module.build

    def building(*args, **kwargs):
        left.append(old())
        return build(*args, **kwargs)

    monkeypatch.setattr(module, "build", building)
    gc.disable()  # what goes, goes because it was let go
    try:
        while t.counters.rollbacks == 0:
            t.train_step()
    finally:
        gc.enable()
    t.close()
    assert left == [None]


def test_a_rollback_that_cannot_build_leaves_nothing_open(tmp_path, model, monkeypatch):
    monkeypatch.setitem(RULES, "made", lambda history: "x" if history[-1]["step"] == 2 else None)
    t = trainer(tmp_path, model, "trainer.on_alarm=rollback")

    def broken(*args, **kwargs):
        raise ValueError("no second model")

    with monkeypatch.context() as patch:
        patch.setattr(module, "build", broken)
        with pytest.raises(ValueError, match="no second model"):
            t.fit()
    trainer(tmp_path, model).close()  # the folder is free again


@pytest.mark.gpu
def test_weights_on_a_device_are_saved_as_they_are(tmp_path, model, monkeypatch):
    """Copies in host memory, tied ones still tied, give the files that the device's own tensors give."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    train(tmp_path / "aside", model, "trainer.device=cuda", "trainer.deterministic=true")
    monkeypatch.setattr(LocalRoles, "saves_in_background", False)
    train(tmp_path / "at-once", model, "trainer.device=cuda", "trainer.deterministic=true")
    assert digests(tmp_path / "aside") == digests(tmp_path / "at-once")
