"""A copy of the repository in which one mutant at a time is tested.

    runner's thread ── try_mutant ──▶ edits a file of its copy
                    ── start ───────▶ fork server, which has imported torch and transformers, but nothing of gspo
                                        └─ forks a process that runs pytest in the copy
                    ◀── exit code, output file

Importing the libraries takes most of the time of a small test, so they are imported once.
"""

from __future__ import annotations

import compileall
import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.catalogue import ROOT, Mutant

MARKERS = "not slow and not gpu and not vllm and not browser"
TESTS_FAILED, COLLECTION_FAILED = 1, 2  # exit codes of pytest
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "first_failure", "PYTHONDONTWRITEBYTECODE": "1"}
LIBRARIES = [
    "pytest",
    "hypothesis",
    "omegaconf",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
]

Outcome = Literal["killed", "timeout", "survived", "error"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What the tests said of one mutant. `detail` is the test that failed, or the end of the output of an error."""

    mutant: Mutant
    outcome: Outcome
    detail: str
    seconds: float


def start_fork_server() -> multiprocessing.context.BaseContext:
    """The process that all tests are forked from."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


class Workshop:
    """A copy of the tracked and untracked files of the repository below `folder`; the working tree is only read."""

    def __init__(self, folder: Path, context: multiprocessing.context.BaseContext, timeout: float) -> None:
        self.root, self._output, self._timeout, self._context = folder / "copy", folder / "output", timeout, context
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        compileall.compile_dir(self.root / "src", quiet=2)

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Whether these tests pass without a mutant."""
        return self._pytest(tests) == 0

    def try_mutant(self, mutant: Mutant) -> Trial:
        """Apply a mutant, run its tests until the first failure, and take it back."""
        file = self.root / mutant.path
        mutated, original = mutant.apply(self.root), file.read_text(encoding="utf-8")
        start = time.monotonic()
        try:
            file.write_text(mutated, encoding="utf-8")
            code = self._pytest(mutant.tests)
        finally:
            file.write_text(original, encoding="utf-8")
        outcome, detail = _judge(code, self._output.read_text(encoding="utf-8", errors="replace"))
        return Trial(mutant, outcome, detail, time.monotonic() - start)

    def _pytest(self, tests: tuple[str, ...]) -> int | None:
        """The exit code of pytest in a process of its own, negative after a signal; None after the time limit."""
        options = ["-q", "-x", "-rfE", "--tb=no", "--no-header", "-m", MARKERS]
        arguments = (str(self.root), str(self._output), [*options, *(f"tests/{path}" for path in tests)])
        process = self._context.Process(target=run_pytest, args=arguments)  # type: ignore[attr-defined]
        process.start()
        process.join(self._timeout)
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError):  # whatever a broken test left behind in its session
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return code


def run_pytest(root: str, output: str, arguments: list[str]) -> None:
    """In a fresh fork: run pytest on the sources below `root`, with everything that it prints in the file `output`."""
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sources = os.path.join(root, "src")
    os.environ.update(ENVIRONMENT, PYTHONPATH=sources)
    os.chdir(root)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "gspo")]:
        del sys.modules[name]  # those of the working tree
    sys.path[:] = [root, sources, *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "src"), ""))]
    sys.argv = ["pytest", *arguments]
    import pytest

    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(code)  # not through exit handlers, where a mutant may hang


def _judge(code: int | None, output: str) -> tuple[Outcome, str]:
    if code is None:
        return "timeout", ""
    if code == 0:
        return "survived", ""
    if code < 0 or code in (TESTS_FAILED, COLLECTION_FAILED):
        found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.MULTILINE)
        return "killed", found[1] if found else f"exit code {code}"
    return "error", output[-500:]
