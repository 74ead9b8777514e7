"""The Slurm scripts, run with stand-ins for srun and scontrol that write down what they are asked to do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "deploy" / "slurm"
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$CALLS"
case "$*" in
  *"python -"*) cat > "$CALLS.python" ;;
  *"ray start"*) exec sleep 60 ;;
  *"gspo train"*)
    trap 'echo saved >> "$CALLS"; exit 143' TERM
    [ -n "$RUN_SECONDS" ] && { sleep "$RUN_SECONDS" & wait $!; }
    exit "${RUN_CODE:-0}" ;;
esac
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-3]" ] && printf 'node1\\nnode2\\nnode3\\n'
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_GPUS_ON_NODE": "4",
        "RUN_SECONDS": "",
    }


def calls(cluster: dict[str, str]) -> list[str]:
    return Path(cluster["CALLS"]).read_text().splitlines()


def test_one_node_starts_torchrun_on_all_its_gpus(cluster: dict[str, str]) -> None:
    subprocess.run(["bash", SLURM / "one_node.sbatch", "my.yaml", "trainer.seed=3"], env=cluster, check=True)
    assert calls(cluster) == [
        "srun torchrun --standalone --nproc-per-node 4 -m gspo train my.yaml actor_rollout_ref.actor.strategy=fsdp2 "
        "trainer.experiment_name=slurm-17 trainer.seed=3"
    ]


def test_several_nodes_make_a_ray_cluster_and_one_run(cluster: dict[str, str]) -> None:
    cluster["RUN_CODE"] = "3"
    done = subprocess.run(["bash", SLURM / "ray.sbatch", "my.yaml", "trainer.seed=3"], env=cluster, timeout=60)
    assert done.returncode == 3  # the code of the run
    seen = calls(cluster)
    starts = [line for line in seen if "ray start" in line]
    assert sum("-w node1 ray start --head" in line for line in starts) == 1
    assert {line.split(" -w ")[1].split()[0] for line in starts} == {"node1", "node2", "node3"}
    assert all("--address=node1:6379" in line for line in starts if "--head" not in line)
    (run,) = [line for line in seen if "gspo train" in line]
    assert run.endswith(
        "-w node1 gspo train my.yaml trainer.backend=ray trainer.nnodes=3 trainer.n_gpus_per_node=4 "
        "trainer.experiment_name=slurm-17 trainer.seed=3"
    )
    compile(Path(cluster["CALLS"] + ".python").read_text(), "wait for nodes", "exec")


def test_a_signal_of_slurm_reaches_the_run_which_saves(cluster: dict[str, str]) -> None:
    cluster["RUN_SECONDS"] = "50"
    job = subprocess.Popen(["bash", SLURM / "ray.sbatch", "my.yaml"], env=cluster)
    deadline = time.monotonic() + 30
    while not (Path(cluster["CALLS"]).exists() and any("gspo train" in line for line in calls(cluster))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # the stand-in sets its trap
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 143
    assert "saved" in calls(cluster)


@pytest.mark.parametrize("name", ["one_node.sbatch", "ray.sbatch"])
def test_a_script_needs_a_config(cluster: dict[str, str], name: str) -> None:
    done = subprocess.run(["bash", SLURM / name], env=cluster, capture_output=True, text=True)
    assert done.returncode != 0 and "usage: sbatch" in done.stderr
