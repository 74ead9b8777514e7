"""Starting a fork server: the real interpreter, a minimal environment, bubblewrap around it at level 3."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .pipes import close_all
from .result import SandboxError

_BOOT = "import sys; sys.path[:0] = [sys.argv[1]]; from inside.boot import main; del sys.path[0]; main({!r}, {!r}, {!r}, {!r})"


def numpy_parent() -> str:
    """The folder from which numpy is imported; "" where it is not installed."""
    spec = importlib.util.find_spec("numpy")
    return str(Path(spec.origin).resolve().parent.parent) if spec is not None and spec.origin else ""


def launch(level: int, descriptor: int, with_numpy: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on the socket `descriptor`. Returns the process, and the id of the one to kill to end them all."""
    # The real interpreter: the link of a virtual environment or a shim script may be where the server cannot read.
    python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    here = str(Path(__file__).resolve().parent)
    boot = _BOOT.format(descriptor, level, numpy_parent(), with_numpy)
    command = [python, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", boot, here]
    if level < 3:
        process = _popen(command, [descriptor])
        return process, process.pid
    info, info_far = os.pipe()
    try:
        process = _popen([*_bubblewrap(python, here, info_far), *command], [descriptor, info_far])
        os.close(info_far)
        info_far = -1
        with open(info, closefd=False) as file:
            text = file.read()
    finally:
        close_all([fd for fd in (info, info_far) if fd >= 0])
    return process, json.loads(text)["child-pid"] if text.strip() else process.pid


def _popen(command: list[str], descriptors: list[int]) -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Symbols are bound at the start: otherwise each child would bind them again.
    env = {"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1", **threads}
    if "LD_LIBRARY_PATH" in os.environ:
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return subprocess.Popen(
        command,
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _bubblewrap(python: str, here: str, info: int) -> list[str]:
    """The command that gives the server no network and a file system with the interpreter and libraries only."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError("sandbox level 3 needs bubblewrap: install the package `bubblewrap` (program `bwrap`)")
    folders = [sys.base_prefix, os.path.dirname(python), here, "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders += ["/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"]
    if numpy_parent():
        folders += [os.path.join(numpy_parent(), name) for name in ("numpy", "numpy.libs")]
    command = [found, "--unshare-all", "--info-fd", str(info), "--proc", "/proc", "--dev", "/dev"]
    for folder in dict.fromkeys(folders):
        command += ["--ro-bind-try", folder, folder]
    return [*command, "--chdir", "/", "--"]
