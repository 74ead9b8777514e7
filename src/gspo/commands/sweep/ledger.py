"""Which trials of a sweep are done: `sweep.json` in its folder, so that an interrupted sweep goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.commands.sweep.spec import Sweep, Trial
from gspo.exit_codes import EXIT_DONE
from gspo.runs.files import write_json


class Ledger:
    """The exit code of each trial, with the words it was started with. Written after every trial."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self.file = sweep, sweep.folder / "sweep.json"
        try:
            saved = untrusted.read_json(self.file)
        except (OSError, untrusted.Unreadable):
            saved = None
        self._trials: dict[str, Any] = saved.get("trials", {}) if isinstance(saved, dict) else {}

    def is_done(self, trial: Trial) -> bool:
        """Whether the trial finished with the settings and the base file that the sweep has now."""
        found = self._trials.get(trial.name)
        return (
            isinstance(found, dict)
            and (found.get("code"), found.get("words"), found.get("base")) == (EXIT_DONE, *self._facts(trial))
            and (self._sweep.folder / trial.name / "result.json").is_file()
        )

    def record(self, trial: Trial, code: int) -> None:
        words, base = self._facts(trial)
        self._trials[trial.name] = {"code": code, "words": words, "base": base}
        write_json(self.file, {"format": 1, "trials": self._trials})

    def failed(self, trials: Sequence[Trial]) -> list[tuple[str, int]]:
        """Names and exit codes of the trials that ended with an error."""
        codes = ((t.name, (self._trials.get(t.name) or {}).get("code", EXIT_DONE)) for t in trials)
        return [(name, code) for name, code in codes if code != EXIT_DONE]

    def _facts(self, trial: Trial) -> tuple[list[str], str]:
        return self._sweep.overrides(trial), self._sweep.digest


def log_file(folder: Path, name: str) -> Path:
    """The file with the output of a trial."""
    return folder / f"{name}.log"
