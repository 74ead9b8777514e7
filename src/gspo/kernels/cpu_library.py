"""cpu_kernels.cpp as a library that Python calls, compiled once per machine and kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# No flag that reorders sums: equal machines, and a resumed run, compute the same bits.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-w")
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_ARGUMENTS = {
    "gspo_attend": [_POINTER] * 7 + [_LONG] * 2 + [_POINTER],
    "gspo_attend_backward": [_POINTER] * 10 + [_LONG] + [_POINTER] * 2 + [_LONG] * 2 + [_POINTER],
    "gspo_decode_attend": [_POINTER] * 9 + [_LONG] * 2 + [_POINTER],
    "gspo_chosen": [_POINTER] * 5 + [_LONG] * 2,
    "gspo_chosen_backward": [_POINTER] * 7 + [_LONG] * 2,
    "gspo_small_batch_linear": [_POINTER] * 3 + [_LONG] * 3,
}


class Shape(ctypes.Structure):
    """The shape of an attention, as the struct of this name in cpu_kernels.cpp."""

    _fields_ = [(name, _LONG) for name in ("heads", "key_heads", "size", "window")] + [("scale", ctypes.c_float)]


def compiler() -> str | None:
    """The C++ compiler that torch would call, if it exists."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be compiled; a compiler that fails is logged as a warning."""
    command = compiler()
    if command is None or sys.platform != "linux":
        return None
    try:
        path = _find_or_compile(command)
        try:
            return _load(path)
        except (OSError, AttributeError):  # the file on disk is damaged
            path.unlink()
            return _load(_find_or_compile(command))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        log.warning("gspo's CPU kernels are not used: %s", text.strip().split("\n")[0])
        return None


def kernels() -> ctypes.CDLL:
    """The kernels, to be called at once; `library` must have found them."""
    found = library()
    assert found is not None
    torch.get_num_threads()  # makes torch set OpenMP's number of threads, which it does late in a new Python thread
    return found


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def _find_or_compile(command: str) -> Path:
    """The compiled library, from disk if this compiler compiled it for this processor."""
    facts = "\0".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, _run(command, "--version"), _processor()))
    name = f"kernels-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    folders = _folders()
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    target = next(f for f in folders if os.access(f, os.W_OK)) / name
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _run(command, *FLAGS, "-c", str(SOURCE), "-o", str(compiled))
        # Linked without -fopenmp: OpenMP calls then use the library and the threads that torch has loaded.
        _run(command, "-shared", str(compiled), "-o", str(linked))
        with open(linked, "rb") as f:
            os.fsync(f.fileno())
        os.replace(linked, target)
    return target


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=300)
    return done.stdout


def _folders() -> list[Path]:
    """Where compiled code is kept: the user's cache, or else a private folder among temporary files."""
    user = os.getuid()
    found = [Path(tempfile.gettempdir(), f"gspo-kernels-{user}")]
    with suppress(RuntimeError):  # no home
        found.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo")
    for folder in found:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [f for f in found if f.is_dir() and f.stat().st_uid == user]


def _processor() -> str:
    """The processor, as far as -march=native depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    kept = ("model name", "flags", "Features", "CPU part", "vendor_id", "cpu family", "model\t")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(kept))])


def is_cpu_float32(tensor: torch.Tensor) -> bool:
    """Whether a tensor is float32 on a CPU, as the kernels require."""
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.itemsize == 4
