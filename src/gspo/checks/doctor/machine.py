"""The machine: memory, devices, engines, sandbox, and the memory of a process without a model."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from gspo.build.device import total_memory

OPTIONAL = ("vllm", "ray", "peft", "datasets", "pyarrow", "wandb", "tensorboard", "matplotlib", "reasoning_gym")


def base_memory() -> int:
    """Bytes of a new process with all libraries and no model. Measured, which takes some seconds."""
    code = (
        "import torch, gspo.loop.run, gspo.build.device as d; torch.ones(8, 8) @ torch.ones(8, 8);"
        "print(d.peak_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


_TRY_VLLM = """
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
if not current_platform.device_type:
    raise SystemExit("it finds no device that it was built for")
"""


def why_no_vllm() -> str | None:
    """Why vLLM cannot be used; "" when it can, None when it is not installed. Tries the import in another process."""
    if find_spec("vllm") is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_VLLM], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "importing it takes more than two minutes"
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].strip() if said else f"importing it fails with exit code {done.returncode}"


def environment() -> dict[str, Any]:
    """Versions, device, memory, engines and sandbox level, as JSON values."""
    import torch

    from gspo.runs.environment import describe
    from gspo.sandbox import GUARANTEES, examine_level

    facts = describe()
    facts["memory_bytes"] = total_memory()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        facts["gpu_memory_bytes"], facts["gpu_memory_free_bytes"] = total, free
    broken = why_no_vllm()
    facts["engines"] = ["native", *(["vllm"] if broken == "" else [])]
    if broken:
        facts["vllm"] = broken
    facts["optional"] = {name: find_spec(name) is not None for name in OPTIONAL}
    level = next((n for n in (3, 2, 1) if examine_level(n).granted), 0)
    facts["sandbox"] = {"level": level, "means": GUARANTEES[level]}
    return facts
