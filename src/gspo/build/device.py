"""The device and the threads of a process."""

from __future__ import annotations

import os

import torch


def default_threads() -> int:
    """OMP_NUM_THREADS if set, else one per core that this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) else len(os.sched_getaffinity(0))


def choose_device(name: str) -> torch.device:
    """The device that `trainer.device` names; auto: a GPU when there is one."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_only_deterministic(enabled: bool) -> None:
    """Allow only operations that give the same bits each time (`trainer.deterministic`); others raise an error."""
    if enabled:  # cuBLAS reads it before its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
