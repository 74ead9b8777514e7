"""`gspo train trainer.backend=ray` as a program: existing and missing clusters, signals, deaths, remaining processes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.distributed.ray.program import Program
from tests.distributed.ray.waiting import wait_until


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
