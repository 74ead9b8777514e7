"""Supervised runs on two ranks: the rows and weights of one process, resume to the bit, and the program's own launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.runs import FSDP
from tests.distributed.test_runs import same_rows, same_weights
from tests.loop.supervised_runs import SMALL
from tests.support.small_run import final_state


@pytest.mark.parametrize("name", ["sft", "sft lora"])
def test_a_run_on_two_ranks_is_the_run_of_one_process(two, here, name):
    assert (two.folder / name / "run" / "result.json").exists(), two.problem()
    same_rows(two.folder / name, here / name, 2e-4)
    same_weights(two.folder / name, here / name, 1e-3)  # the learning rate is 1e-2


def test_two_ranks_go_on_where_one_process_stopped(two, here):
    same_rows(two.folder / "sft from one", here / "sft", 2e-4)
    same_weights(two.folder / "sft from one", here / "sft", 1e-3)


def test_two_ranks_stopped_and_resumed_give_the_same_bits(two):
    assert final_state(two.folder / "sft again" / "run") == final_state(two.folder / "sft" / "run")


@pytest.mark.slow
def test_the_program_launches_its_ranks(tmp_path, model):
    paths = (f"trainer.default_local_dir={tmp_path}", "--model", str(model), "--out", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "sft", *SMALL, *paths, FSDP, "trainer.n_gpus_per_node=2", "--device", "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("result: ")]
    assert json.loads(result.removeprefix("result: "))["steps"] == 4
    assert "2 ranks on cpu" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
