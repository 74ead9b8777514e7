"""What every Sink must do. A test class derives from SinkContract and says how to open a sink and read back its rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from gspo.runs.sinks import RunInfo, Sink

Rows = dict[int, dict[str, float]]
NAMES = ("critic/score_all/mean", "actor/grad_norm", "timing_s/step", "val-core/openai/gsm8k/acc/mean@1")


class SinkContract(ABC):
    """`open` makes a sink of a run; `read` returns the finite numbers that it keeps, by step and name."""

    @abstractmethod
    def open(self, run: RunInfo) -> Sink: ...

    @abstractmethod
    def read(self, run: RunInfo) -> Rows: ...

    def info(self, folder: Path) -> RunInfo:
        return RunInfo(folder, "project", folder.name, {"trainer": {"seed": 7}})

    def check(self, run: RunInfo, expected: Mapping[int, Mapping[str, float]]) -> None:
        finite = {step: {n: v for n, v in row.items() if math.isfinite(v)} for step, row in expected.items()}
        assert self.read(run) == finite

    def test_rows_are_kept_under_their_step_and_names(self, tmp_path: Path) -> None:
        run = self.info(tmp_path)
        rows = {0: {NAMES[3]: 0.25}, 1: {NAMES[0]: 0.5, NAMES[1]: 2.0}, 4: {NAMES[0]: 0.75, NAMES[2]: 1.5}}
        sink = self.open(run)
        for step, values in rows.items():
            sink.log(step, values)
        sink.close()
        self.check(run, rows)

    def test_a_number_that_is_not_finite_harms_no_other(self, tmp_path: Path) -> None:
        run = self.info(tmp_path)
        row = {NAMES[0]: float("nan"), NAMES[1]: float("inf"), NAMES[2]: 1.5}
        sink = self.open(run)
        sink.log(1, row)
        sink.close()
        self.check(run, {1: row})

    def test_the_values_are_left_as_they_are(self, tmp_path: Path) -> None:
        """Every sink of a run receives the same mapping."""
        sink = self.open(self.info(tmp_path))
        values = {NAMES[0]: 0.5, NAMES[1]: float("nan")}
        sink.log(1, values)
        sink.close()
        assert list(values) == [NAMES[0], NAMES[1]]
        assert values[NAMES[0]] == 0.5 and math.isnan(values[NAMES[1]])

    def test_a_run_that_continues_adds_to_its_rows(self, tmp_path: Path) -> None:
        run = self.info(tmp_path)
        rows = {step: {NAMES[0]: step / 8} for step in (1, 2, 3)}
        for steps in ((1, 2), (3,)):
            sink = self.open(run)
            for step in steps:
                sink.log(step, rows[step])
            sink.close()
        self.check(run, rows)

    def test_a_sink_may_close_without_a_row(self, tmp_path: Path) -> None:
        run = self.info(tmp_path)
        self.open(run).close()
        self.check(run, {})
