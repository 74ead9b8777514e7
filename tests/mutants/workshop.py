"""A copy of the repository in which one mutant at a time is tested."""

from __future__ import annotations

import compileall
import contextlib
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
CRASHED = range(-64, 0)  # ended by a signal

Outcome = Literal["killed", "timeout", "survived", "error"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What the tests said of one mutant. `detail` is the test that failed, or the end of the output of an error."""

    mutant: Mutant
    outcome: Outcome
    detail: str
    seconds: float


class Workshop:
    """A copy of the tracked and untracked files of the repository below `folder`; the working tree is only read."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.root, self.timeout = folder, timeout
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        compileall.compile_dir(folder / "src", quiet=2)

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Whether these tests pass without a mutant."""
        return self._pytest(tests, stop_at_first=False)[0] == 0

    def try_mutant(self, mutant: Mutant) -> Trial:
        """Apply a mutant, run its tests until the first failure, and take it back."""
        file = self.root / mutant.path
        mutated, original = mutant.apply(self.root), file.read_text(encoding="utf-8")
        start = time.monotonic()
        try:
            file.write_text(mutated, encoding="utf-8")
            code, output = self._pytest(mutant.tests, stop_at_first=True)
        finally:
            file.write_text(original, encoding="utf-8")
        outcome, detail = _judge(code, output)
        return Trial(mutant, outcome, detail, time.monotonic() - start)

    def _pytest(self, tests: tuple[str, ...], *, stop_at_first: bool) -> tuple[int | None, str]:
        """The exit code of pytest in a fresh process (None after the time limit) and its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--no-header", "-m", MARKERS]
        command += ["-x"] * stop_at_first + [f"tests/{path}" for path in tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",  # a stale cache of a mutant would be run as another one
            "OMP_NUM_THREADS": "1",
            "HYPOTHESIS_PROFILE": "first_failure",
        }
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.timeout)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _end_session(process)


def _end_session(process: subprocess.Popen[str]) -> None:
    """End pytest and whatever a broken test left behind in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _judge(code: int | None, output: str) -> tuple[Outcome, str]:
    if code is None:
        return "timeout", ""
    if code == 0:
        return "survived", ""
    if code in (TESTS_FAILED, COLLECTION_FAILED) or code in CRASHED:
        found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.MULTILINE)
        return "killed", found[1] if found else f"exit code {code}"
    return "error", output[-500:]
