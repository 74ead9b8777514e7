"""The device, the threads and the memory of a process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gspo.processes import num_cores

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def default_threads() -> int:
    """OMP_NUM_THREADS if set, else one per core that this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named):
        return int(named)
    return num_cores()


class DeviceError(ValueError):
    """The device that was asked for is not there."""


def choose_device(name: str) -> torch.device:
    """The device that `trainer.device` names; auto: a GPU when there is one. DeviceError when it is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if problem := _problem_of(device):
        raise DeviceError(f"trainer.device={name}: {problem}; set trainer.device=auto, or cpu")
    return device


def _problem_of(device: torch.device) -> str | None:
    """Why a device cannot be used; None when it can."""
    if device.type == "mps" and not torch.backends.mps.is_available():
        return f"torch {torch.__version__} finds no Apple GPU here"
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        return f"torch {torch.__version__} {built}"
    count = torch.cuda.device_count()
    return f"there are only {count} GPUs, counted from 0" if (device.index or 0) >= count else None


def use_only_deterministic(enabled: bool) -> None:
    """Allow only operations that give the same bits each time (`trainer.deterministic`); others raise an error."""
    if enabled:  # cuBLAS reads it before its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


def total_memory() -> int:
    """Bytes of memory that this process may use: all of the machine, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def peak_memory() -> int:
    """The most bytes that this process has held since it started."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def held_memory() -> int:
    """Bytes that this process holds now; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.is_file() else 0
