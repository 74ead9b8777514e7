"""What a process of a run computes with: its device and its threads."""

from __future__ import annotations

import os

import torch


def default_threads() -> int:
    """As many as OMP_NUM_THREADS says, else one a core this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) else len(os.sched_getaffinity(0))


def choose_device(name: str) -> torch.device:
    """What `trainer.device` names; auto: a GPU when there is one."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_only_deterministic(wanted: bool) -> None:
    """As `trainer.deterministic` says: operations that give the same bits each time, or an error where there is none."""
    if wanted:  # what cuBLAS must find before its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
