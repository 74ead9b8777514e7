"""The environment of a run: versions, device, threads. Written into the run folder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import gspo

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "omegaconf",
    "math-verify",
    "peft",
    "vllm",
    "ray",
)


def describe() -> dict[str, Any]:
    """Facts about the machine and the packages of this process, JSON-able."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "gspo": gspo.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "num_gpus": torch.cuda.device_count() if cuda else 0,
        "cuda": torch.version.cuda,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git_revision(),
        "argv": sys.argv,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of the checkout that this package runs from; None for an installed package."""
    root = Path(gspo.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
