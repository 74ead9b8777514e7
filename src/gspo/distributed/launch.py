"""Launching a run on several ranks with torchrun: how many, on which devices, and how their exit code returns."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gspo.config import ConfigErrors, TrainerConfig
from gspo.config.problems import Problem
from gspo.distributed.rank_group import RankPlace
from gspo.exit_codes import EXIT_DONE, EXIT_WORKERS_LOST
from gspo.processes import free_port

CODE_FILE = "GSPO_EXIT_CODE_FILE"  # the file in which rank 0 reports its exit code to the launcher
SHUTDOWN_SECONDS = 300  # for the current step and its checkpoint after a signal; torchrun's default is 30


def launched_ranks() -> int:
    """Number of processes of this torchrun launch; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def local_ranks() -> int:
    """Number of those processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched_ranks() > 1 else 1


def trainer_gpus(device: torch.device) -> set[int]:
    """The GPUs of this machine that train: one per rank, or the one of `device`."""
    return set(range(local_ranks())) if launched_ranks() > 1 else {device.index or 0}


def check_launch(config: TrainerConfig) -> None:
    """Raise ConfigErrors if the launched processes do not match the strategy or the number of ranks in the config."""
    strategy, requested = config.actor_rollout_ref.actor.strategy, config.trainer.n_gpus_per_node
    here = local_ranks()
    if launched_ranks() > 1 and strategy != "fsdp2":
        key, value = "actor_rollout_ref.actor.strategy", strategy
        message = f"torchrun started {launched_ranks()} processes, but only fsdp2 trains in several"
        remedy = "set actor_rollout_ref.actor.strategy=fsdp2, or start one process without torchrun"
    elif strategy == "fsdp2" and requested is not None and max(requested, 1) != here:
        key, value = "trainer.n_gpus_per_node", requested
        message = f"{here} process{'es were' if here > 1 else ' was'} started on this machine"
        remedy = f"torchrun --standalone --nproc-per-node {requested} -m gspo train …, or remove the key"
    else:
        return
    raise ConfigErrors([Problem("error", key, value, "config", message, remedy)])


def launch(config: TrainerConfig, program: Sequence[str]) -> int | None:
    """Run `program`, words of torchrun, on trainer.n_gpus_per_node ranks of this machine. Returns rank 0's exit code.

    Returns None without starting anything for a single rank, and in a process that torchrun started.
    """
    num_ranks = config.trainer.n_gpus_per_node
    if num_ranks is None:  # all GPUs, unless trainer.device names one
        num_ranks = torch.cuda.device_count() if config.trainer.device in ("auto", "cuda") else 1
    launches = config.trainer.backend == "local" and config.actor_rollout_ref.actor.strategy == "fsdp2"
    if not launches or num_ranks <= 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    with tempfile.TemporaryDirectory(prefix="gspo-launch-") as folder:
        os.environ[CODE_FILE] = str(Path(folder) / "exit-code")
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        try:
            torchrun(["--standalone", "--nproc-per-node", str(num_ranks), *program])
        except ChildFailedError as error:
            first = error.failures[0] if 0 in error.failures else error.get_first_failure()[1]
            # A negative code is the signal that killed the rank.
            return first.exitcode if first.exitcode > 0 else EXIT_WORKERS_LOST
        except SignalException:  # the ranks received it too; rank 0 reports whether they saved
            return _reported_code()
        finally:
            del os.environ[CODE_FILE]
    return EXIT_DONE


def report_exit_code(code: int) -> None:
    """On rank 0: report the exit code of the run to the process that launched the ranks."""
    file = os.environ.get(CODE_FILE)
    if file is not None and os.environ.get("RANK") == "0":
        Path(file).write_text(str(code))


def _reported_code() -> int:
    try:
        return int(Path(os.environ[CODE_FILE]).read_text())
    except (FileNotFoundError, ValueError):
        message = "the ranks ended before they had saved; the same command goes on from the last checkpoint"
        print(f"error: {message}", file=sys.stderr)
        return EXIT_WORKERS_LOST


def launched_place(device: str) -> RankPlace:
    """This process's place in the launch; `device` is trainer.device (auto, cpu, cuda, cuda:N)."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if launched_ranks() == 1:
        where = (device if ":" in device else "cuda:0") if on_gpu else "cpu"
        return RankPlace(0, 1, 0, "127.0.0.1", free_port(), where)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return RankPlace(
        rank=int(os.environ["RANK"]),
        world_size=launched_ranks(),
        local_rank=local_rank,
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        device=f"cuda:{local_rank}" if on_gpu else "cpu",
    )
