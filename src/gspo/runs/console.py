"""Progress for a person: a live line and a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gspo.runs.metric_names import held_out_score

Column = tuple[str, str | None, str]  # title, metric, format
COLUMNS: tuple[Column, ...] = (
    ("step", None, "{:.0f}"),
    ("reward", "critic/score_all/mean", "{:.3f}"),
    ("held-out", "val", "{:.3f}"),
    ("kept", "train/filtered_prompts_ratio", "{:.0%}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.3f}"),
    ("tok/s", "speed", "{:,.0f}"),
    ("s/step", "timing_s/step", "{:.2f}"),
)
SUPERVISED_COLUMNS: tuple[Column, ...] = (
    ("step", None, "{:.0f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("held-out loss", "val/loss", "{:.4f}"),
    ("held-out", "val", "{:.3f}"),
    ("lr", "actor/lr", "{:.2e}"),
    ("grad", "actor/grad_norm", "{:.3f}"),
    ("tok/s", "perf/throughput", "{:,.0f}"),
    ("s/step", "timing_s/step", "{:.2f}"),
)


class Console:
    """Progress on standard output. `say` is for sentences, `step` for one row of metrics."""

    def __init__(self, *, every: int = 5, enabled: bool = True, columns: Sequence[Column] = COLUMNS) -> None:
        self.rich = RichConsole(quiet=not enabled, highlight=False, soft_wrap=True)
        self.every, self._columns = every, columns
        self._rows: list[Mapping[str, float]] = []
        self._live = None
        self._started = time.monotonic()
        self._first: int | None = None

    def say(self, text: str) -> None:
        self.stop()
        self.rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        self.stop()
        self.rich.print(f"warning: {text}", style="yellow", markup=False)

    def step(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        """Show one training step; on a terminal as a live line, with a table every few steps."""
        if self._first is None:
            self._first, self._started = step - 1, time.monotonic() - values.get("timing_s/step", 0.0)
        speed = values.get("perf/rollout_throughput", values.get("perf/throughput"))
        row = {**values, "step": step, "val": held_out_score(values), "speed": speed}
        if not self.rich.is_terminal:
            self.rich.print(self._line(row, total), markup=False)
            return
        self._rows.append(row)
        if len(self._rows) >= self.every or step == total:
            self.stop()
            self.rich.print(_table(self._columns, self._rows))
            self._rows.clear()
        else:
            self._show(self._line(row, total))

    def generating(self, step: int, total: int | None, kept: int, needed: int) -> None:
        """Show how far the next batch is; on a terminal only, where the line is replaced."""
        if self.rich.is_terminal:
            self._show(f"{_position(step, total)}  generating: {kept} of {needed} groups kept")

    def _line(self, row: Mapping[str, float], total: int | None) -> str:
        values = [(title, row.get(key or ""), form) for title, key, form in self._columns[1:]]
        parts = [_position(row["step"], total), *(f"{t} {form.format(v)}" for t, v, form in values if v is not None)]
        if total and self._first is not None:
            spent = time.monotonic() - self._started
            left = spent / (row["step"] - self._first) * (total - row["step"])
            parts.append(f"left {left:.0f} s")
        return "  ".join(parts)

    def _show(self, line: str) -> None:
        if self._live is None:
            self._live = Live(console=self.rich, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def stop(self) -> None:
        """Remove the live line from the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def side_by_side(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A small table of texts, such as answers before and after training."""
        self.stop()
        table = Table(title=title, title_justify="left")
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.rich.print(table)


def _position(step: float, total: int | None) -> str:
    return f"step {step:.0f}" + (f"/{total}" if total else "")


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for row in rows:
        values = [(row.get(key or "step"), form) for _, key, form in columns]
        table.add_row(*("" if value is None else form.format(value) for value, form in values))
    return table
