"""The program under torchrun: rank 0's output and files, Ctrl-C, and ranks that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gspo.checkpoint import folder as checkpoint
from tests.distributed.runs import FSDP
from tests.support.small_run import config

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(bool(solution_str) and ord(solution_str[0]) % 2 == 0)
"""


def launch(folder: Path, model: Path, *overrides: str, ranks: int = 2) -> subprocess.Popen[str]:
    """`gspo train` on some ranks, in a new process group, as from a terminal."""
    (folder / "reward.py").write_text(REWARD)
    resolved = config(folder, model, f"custom_reward_function.path={folder / 'reward.py'}", *overrides)
    (folder / "config.yaml").write_text(resolved.to_yaml())
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "gspo"]
    return subprocess.Popen(
        [*program, "train", str(folder / "config.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


def read_to(process: subprocess.Popen[str], pattern: str) -> str:
    """The output up to a line that matches."""
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"ended without {pattern!r}:\n{seen}")


def rank_pids(launcher: int) -> dict[int, int]:
    """Process ids by rank, from the environment that torchrun set."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(int(entry.name)) == launcher:
            names = (entry / "environ").read_text().split("\0")
            found |= {int(n.removeprefix("RANK=")): int(entry.name) for n in names if n.startswith("RANK=")}
    return found


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def in_session(session: int) -> list[int]:
    """Running processes of the launch, direct children or not."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                left.append(int(entry.name))
    return left


def end(process: subprocess.Popen[str], limit: float = 60.0) -> str:
    """Wait for the end of all processes of the launch. Returns the rest of the output."""
    try:
        rest, _ = process.communicate(timeout=limit)
        time.sleep(0.5)
        assert in_session(process.pid) == []
        return rest
    finally:
        if in_session(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


LONG = ("trainer.total_training_steps=500", "trainer.save_freq=2", FSDP)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_stops_the_run_and_is_named(tmp_path, model, rank):
    process = launch(tmp_path, model, *LONG)
    read_to(process, r"^step 3/")
    victim = rank_pids(process.pid)[rank]
    os.kill(victim, signal.SIGKILL)
    rest = end(process)
    assert f"trainer rank {rank} (process {victim}) is gone" in rest
    assert process.returncode != 0
    assert checkpoint.latest(tmp_path / "run" / "checkpoints")[0] is not None


@pytest.mark.slow
def test_ctrl_c_stops_after_the_step_and_saves(tmp_path, model):
    process = launch(tmp_path, model, *LONG)
    read_to(process, r"^step 3/")
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all; torchrun then sends it again
    rest = end(process)
    stopped = re.search(r"stopped at step (\d+) of 500; saved", rest)
    assert stopped, rest
    path, _ = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert path is not None and path.name == f"step-{int(stopped.group(1)):06d}"


@pytest.mark.slow
def test_a_config_for_one_process_is_refused(tmp_path, model):
    process = launch(tmp_path, model)
    rest = end(process, limit=120)
    assert "torchrun started 2 processes, but only fsdp2 trains in several" in rest
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_embedded_task_is_the_same_on_two_ranks_by_two_keys(tmp_path):
    common = [
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "data.num_val_samples=16",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, keys in (("one", []), ("two", [FSDP, "trainer.n_gpus_per_node=2"])):
        program = [sys.executable, "-m", "gspo", "train", *common, f"trainer.experiment_name={name}", *keys]
        subprocess.run(program, check=True, env=environment, capture_output=True, timeout=500)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 4
    for want, got in zip(one, two):
        kept = {k for k in want if not k.startswith(("timing_s/", "perf/"))}
        for key in kept:
            assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-5), (want["step"], key)
    first, second = (
        load_file(tmp_path / name / "checkpoints" / "step-000003" / "model.safetensors") for name in ("one", "two")
    )
    assert max(float((first[k] - second[k]).abs().max()) for k in first) < 1e-4
