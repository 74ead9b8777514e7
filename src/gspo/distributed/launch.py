"""The processes that torchrun starts for a run: how many, where, and whether the config asks for them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gspo.config import ConfigErrors, TrainerConfig
from gspo.config.problems import Problem
from gspo.distributed.rank_group import RankPlace
from gspo.exit_codes import EXIT_DONE, EXIT_WORKERS_LOST
from gspo.processes import free_port

CODE_FILE = "GSPO_EXIT_CODE_FILE"  # where rank 0 writes its exit code for who launched it
SHUTDOWN_SECONDS = 300  # for the step in flight and its checkpoint, after a signal; torchrun gives 30


def launched_ranks() -> int:
    """Processes that torchrun started together with this one; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def local_ranks() -> int:
    """Those of them that run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched_ranks() > 1 else 1


def trainer_gpus(device: torch.device) -> set[int]:
    """The GPUs of this machine that train: one a rank, or the one that `device` names."""
    return set(range(local_ranks())) if launched_ranks() > 1 else {device.index or 0}


def check_launch(config: TrainerConfig) -> None:
    """Refuse processes that the config does not ask for, and a config that asks for processes that are not there."""
    strategy, asked = config.actor_rollout_ref.actor.strategy, config.trainer.n_gpus_per_node
    if launched_ranks() > 1 and strategy != "fsdp2":
        message = f"torchrun started {launched_ranks()} processes, but only fsdp2 trains in several"
        remedy = "set actor_rollout_ref.actor.strategy=fsdp2, or start one process without torchrun"
        raise _refusal("actor_rollout_ref.actor.strategy", strategy, message, remedy)
    here = local_ranks()
    if strategy == "fsdp2" and asked is not None and max(asked, 1) != here:
        message = f"{here} process{'es were' if here > 1 else ' was'} started on this machine"
        remedy = f"torchrun --standalone --nproc-per-node {asked} -m gspo train …, or remove the key"
        raise _refusal("trainer.n_gpus_per_node", asked, message, remedy)


def _refusal(key: str, value: Any, message: str, remedy: str) -> ConfigErrors:
    return ConfigErrors([Problem("error", key, value, "config", message, remedy)])


def launch(config: TrainerConfig, arguments: list[str]) -> int | None:
    """Start `gspo` with `arguments` on as many ranks as the config asks for on this machine; rank 0's exit code.

    None when there is nothing to start: one rank is asked for, or this process is one of those that were started.
    """
    asked = config.trainer.n_gpus_per_node
    if asked is None:  # all devices found, unless one is named
        asked = torch.cuda.device_count() if config.trainer.device in ("auto", "cuda") else 1
    wanted = config.trainer.backend == "local" and config.actor_rollout_ref.actor.strategy == "fsdp2"
    if not wanted or asked <= 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    with tempfile.TemporaryDirectory(prefix="gspo-launch-") as folder:
        os.environ[CODE_FILE] = str(Path(folder) / "exit-code")
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        try:
            torchrun(["--standalone", "--nproc-per-node", str(asked), "-m", "gspo", *arguments])
        except ChildFailedError as error:
            first = error.failures[0] if 0 in error.failures else error.get_first_failure()[1]
            # Negative: it was killed by that signal.
            return first.exitcode if first.exitcode > 0 else EXIT_WORKERS_LOST
        except SignalException:  # the ranks had it too; whether they have saved, rank 0 knows
            return _reported_code()
        finally:
            del os.environ[CODE_FILE]
    return EXIT_DONE


def report_exit_code(code: int) -> None:
    """On rank 0: leave the exit code of the run for the process that launched the ranks."""
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
    """Where torchrun put this process; `device` is the config's (auto, cpu, cuda)."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if launched_ranks() > 1 else 0
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if launched_ranks() == 1:
        where = (device if ":" in device else "cuda:0") if on_gpu else "cpu"
        return RankPlace(0, 1, 0, "127.0.0.1", free_port(), where)
    return RankPlace(
        rank=int(os.environ["RANK"]),
        world_size=launched_ranks(),
        local_rank=local_rank,
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        device=f"cuda:{local_rank}" if on_gpu else "cpu",
    )
