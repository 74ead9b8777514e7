"""Rollout and reward workers killed, stopped and dying over and over under a real run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.loop.run import run_program as run_command
from gspo.rollout.workers import worker_slot
from gspo.rollout.workers.worker import RolloutWorker
from gspo.runs.console import Console
from tests.faults import audit
from tests.loop.runs import rows, train, trainer
from tests.loop.workers import connect
from tests.rollout.workers.processes import shared_memory, wait_until, workers
from tests.rollout.workers.thread_connection import ThreadConnection
from tests.support.small_run import config, even_first_byte, make_model

ROLLOUT = "actor_rollout_ref.rollout."
ASYNC = (f"{ROLLOUT}mode=async", f"{ROLLOUT}max_head_offpolicyness=2")

DEADLY_REWARD = '''
import os, signal
from pathlib import Path

def reward(data_source, solution_str, ground_truth, extra_info=None):
    """Kills its own process, once."""
    try:
        Path({marker!r}).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass
    return float(bool(solution_str) and ord(solution_str[0]) % 2 == 0)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def nothing_left():
    before = shared_memory()
    yield
    assert wait_until(lambda: not workers(), 20), "a worker process was left"
    assert shared_memory() == before


def pids(fleet: Any) -> list[int]:
    return [slot.connection.pid for slot in fleet.slots]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((folder / "run" / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


@pytest.mark.slow
def test_a_killed_worker_of_a_fleet_in_step_changes_no_number(model, tmp_path, nothing_left):
    settings = ("data.gen_batch_size=8", f"{ROLLOUT}max_num_seqs=64")
    train(tmp_path / "one", model, *settings)
    t = trainer(tmp_path / "fleet", model, *settings, f"{ROLLOUT}num_workers=2")
    fleet: Any = t.parts.engine
    calls, step = [0], fleet.step

    def stepping() -> Any:
        calls[0] += 1
        if calls[0] in (2, 5):
            os.kill(pids(fleet)[calls[0] % 2], signal.SIGKILL)
        return step()

    fleet.step = stepping
    t.fit()
    assert rows(tmp_path / "fleet")[-1]["rollout/worker_restarts"] == 2
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "fleet")[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strikes",
    [(signal.SIGKILL,), pytest.param((signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL), marks=pytest.mark.slow)],
)
def test_an_async_run_survives_killed_and_stopped_workers(strikes, model, tmp_path, nothing_left):
    reward = tmp_path / "deadly.py"
    reward.write_text(DEADLY_REWARD.format(marker=str(tmp_path / "killed")))
    t = trainer(
        tmp_path,
        model,
        *ASYNC,
        f"{ROLLOUT}worker_timeout=4",
        "data.max_response_length=16",
        f"custom_reward_function.path={reward}",
        "custom_reward_function.name=reward",
        "reward.num_workers=1",
        reward=None,
    )
    said: list[str] = []
    t.console.warn = said.append  # pyright: ignore
    fleet: Any = t.parts.engine
    for slot in fleet.slots:
        slot._notify = said.append
    step = t.train_step

    def striking() -> None:
        step()
        if t.step <= len(strikes):
            os.kill(pids(fleet)[0], strikes[t.step - 1])

    t.train_step = striking
    t.fit()
    assert (tmp_path / "killed").exists(), "the reward's worker was not killed"
    assert any("killed by SIGKILL" in message for message in said)
    assert rows(tmp_path)[-1]["step"] == 4 and audit.problems(tmp_path / "run") == []
    assert max(audit.staleness(tmp_path / "run")) <= 2
    assert "reward_failures" in str(rows(tmp_path)[0])


def test_workers_that_always_die_end_the_run_with_code_8_and_the_cause_first(model, tmp_path, monkeypatch, capsys):
    class Dying(ThreadConnection):
        def send(self, method: Any, *args: Any) -> Any:
            if method in (RolloutWorker.step, RolloutWorker.pump):
                self.kill("was killed by SIGKILL")
            return super().send(method, *args)

    def dying(spec: Any, index: int = 0, log: Any = None) -> Dying:
        engine = connect(spec)._make()
        return Dying(lambda: engine, index)

    monkeypatch.setattr(worker_slot, "BACKOFF", (0.0, 0.0, 0.0))
    monkeypatch.setattr("gspo.build.engines.ProcessConnection", dying)
    settings = config(tmp_path, model, *ASYNC, "trainer.val_before_train=false")
    code = run_command(settings, reward_fn=even_first_byte, console=Console(enabled=False))
    assert code == 8
    assert capsys.readouterr().err.strip().splitlines()[-3].startswith("error: rollout worker 0: was killed by SIGKILL")
