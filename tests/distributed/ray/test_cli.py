"""`gspo train trainer.backend=ray` as a program: existing and missing clusters, signals, deaths, remaining processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.distributed.ray.waiting import wait_until

SMALL = (
    "trainer.backend=ray",
    "trainer.experiment_name=run",
    "trainer.num_threads=1",
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "data.num_train_samples=64",
    "data.num_val_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "reward.num_workers=1",
)
MARK = "GSPO_TEST_RUN"


class Program:
    """`gspo train` in a new process group; its processes are found by an environment variable."""

    def __init__(self, folder: Path, *overrides: str, **environment: str) -> None:
        self.name = uuid.uuid4().hex
        self.out = folder / "out.txt"
        outside = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gspo", "train", *SMALL, f"trainer.default_local_dir={folder}", *overrides],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**outside, MARK: self.name, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.out.read_text()

    def pids(self, title: str = "") -> list[int]:
        """The ids of its processes, itself included, whose command line contains `title`."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and f"{MARK}={self.name}".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes()
                    if command and title.encode() in command:
                        found.append(int(path.name))
            except OSError:
                continue
        return found

    def reaches(self, step: int) -> bool:
        return wait_until(lambda: f"step {step}/" in self.text or self.process.poll() is not None, 240)

    def end(self, seconds: float = 240) -> int:
        """Wait until all its processes are gone. Returns its exit code."""
        code = self.process.wait(seconds)
        assert wait_until(lambda: not self.pids()), [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:300] for pid in self.pids()
        ]
        return code


@pytest.fixture
def start(tmp_path):
    programs: list[Program] = []

    def make(*overrides: str, **environment: str) -> Program:
        programs.append(Program(tmp_path, *overrides, **environment))
        return programs[-1]

    yield make
    for program in programs:
        for pid in program.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_local_cluster_is_started_and_ends_with_the_run(start, tmp_path):
    program = start("trainer.total_training_steps=2", "actor_rollout_ref.rollout.num_workers=2")
    assert program.end() == 0, program.text
    assert '"steps": 2' in program.text and (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.slow
def test_an_existing_cluster_is_used_and_left_as_it_was(start, cluster):
    address = cluster.get_runtime_context().gcs_address
    program = start("trainer.total_training_steps=1", RAY_ADDRESS=address)
    assert program.end() == 0, program.text
    assert not program.pids("gcs_server")
    assert wait_until(lambda: cluster.available_resources()["CPU"] == 8)


def test_a_wrong_address_is_refused_by_its_name(start):
    program = start("trainer.total_training_steps=1", RAY_ADDRESS="127.0.0.1:1")
    assert program.end() == 2, program.text
    assert "error: RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there" in program.text


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_everything(start, tmp_path):
    program = start("trainer.total_training_steps=1000")
    assert program.reaches(1)
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does: to all processes of the group
    assert program.end() == 130, program.text
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_controller_leaves_no_process(start, number):
    program = start("trainer.total_training_steps=1000")
    assert program.reaches(1)
    os.kill(program.process.pid, number)
    assert program.end() == (143 if number == signal.SIGTERM else -signal.SIGKILL), program.text


@pytest.mark.slow
def test_a_rank_killed_before_a_checkpoint_stops_the_run_with_the_cause_first(start):
    program = start("trainer.total_training_steps=1000", "trainer.save_freq=-1")
    assert program.reaches(1)
    (pid,) = program.pids("ray::RankWorker")
    os.kill(pid, signal.SIGKILL)
    assert program.end(60) == 8, program.text
    assert "error: trainer rank 0 of 1 died" in program.text


@pytest.mark.slow
def test_a_killed_rollout_actor_is_replaced_and_a_killed_rank_too(start):
    program = start(
        "trainer.total_training_steps=8",
        "trainer.save_freq=1",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.max_head_offpolicyness=2",
    )
    for step, title in ((1, "ray::RolloutHost"), (3, "ray::RankWorker")):
        assert program.reaches(step)
        pids = program.pids(title)
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)
    assert program.end() == 0, program.text
    assert "rollout worker 0 died" in program.text and "trainer rank 0 of 1 died" in program.text
    assert '"steps": 8' in program.text


@pytest.mark.slow
def test_a_dead_head_of_the_cluster_ends_the_run_with_its_cause_and_leaves_no_process(start, tmp_path):
    program = start("trainer.total_training_steps=1000", "actor_rollout_ref.rollout.num_workers=1")
    assert program.reaches(1)
    (pid,) = program.pids("gcs_server")
    os.kill(pid, signal.SIGKILL)
    assert program.end(60) == 8, program.text
    assert "error: the head of the Ray cluster (GCS at " in program.text and "has died" in program.text
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
