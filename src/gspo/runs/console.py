"""Progress for a person: a table of steps and a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gspo.runs.metric_names import held_out_score

QUIET = 10.0  # seconds after which a log that is not a terminal says what runs
TICK = 0.5  # seconds between two looks

# Title, metric, format, width, rank: on a terminal the columns of the lowest ranks are shown that its width allows.
Column = tuple[str, str, str, int, int]
COLUMNS: tuple[Column, ...] = (
    ("step", "step", "{}", 9, 0),
    ("reward", "critic/score_all/mean", "{:.3f}", 6, 1),
    ("held-out", "val", "{:.3f}", 8, 2),
    ("kept", "train/filtered_prompts_ratio", "{:.0%}", 4, 4),
    ("clip", "actor/pg_clipfrac", "{:.3f}", 5, 6),
    ("length", "response_length/mean", "{:.1f}", 6, 5),
    ("entropy", "actor/entropy", "{:.3f}", 7, 9),
    ("grad", "actor/grad_norm", "{:.3f}", 6, 10),
    ("tok/s", "speed", "{:,.0f}", 7, 8),
    ("s/step", "timing_s/step", "{:.2f}", 6, 7),
    ("left", "left", "{}", 10, 3),
)
SUPERVISED_COLUMNS: tuple[Column, ...] = (
    ("step", "step", "{}", 9, 0),
    ("loss", "train/loss", "{:.4f}", 7, 1),
    ("held-out loss", "val/loss", "{:.4f}", 13, 2),
    ("held-out", "val", "{:.3f}", 8, 3),
    ("lr", "actor/lr", "{:.2e}", 8, 7),
    ("grad", "actor/grad_norm", "{:.3f}", 6, 8),
    ("tok/s", "perf/throughput", "{:,.0f}", 7, 6),
    ("s/step", "timing_s/step", "{:.2f}", 6, 5),
    ("left", "left", "{}", 10, 4),
)
PREFERENCE_COLUMNS: tuple[Column, ...] = (
    *SUPERVISED_COLUMNS[:2],
    ("order right", "train/accuracy", "{:.3f}", 11, 3),
    ("held-out", "val/accuracy", "{:.3f}", 8, 2),
    *SUPERVISED_COLUMNS[4:],
)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on standard error what runs, and for how long, while a block runs that prints nothing itself."""
    console = Console()
    console.rich = RichConsole(stderr=True, highlight=False)
    console.doing(what)
    try:
        yield
    finally:
        console.stop()


class Console:
    """Progress on standard output: `say` is for sentences, `step` for one row of metrics, `doing` for what runs now.

    On a terminal every step is a row of a table, and the last line says what runs now and for how long. Elsewhere every
    step is a line, and what runs now is printed only when nothing else was for `QUIET` seconds.
    """

    def __init__(self, *, every: int = 5, enabled: bool = True, columns: Sequence[Column] = COLUMNS) -> None:
        self.rich = RichConsole(quiet=not enabled, highlight=False)
        self.every, self._columns, self._enabled = every, columns, enabled
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._activity: str | None = None
        self._since = self._printed = time.monotonic()
        self._num_steps, self._seconds = 0, 0.0  # of the steps shown
        self._num_rows = 0
        self._ticker: threading.Thread | None = None
        self._end = threading.Event()

    def say(self, text: str) -> None:
        self._print(text)

    def command(self, text: str) -> None:
        """Print a line to be copied: it is never broken."""
        self._print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def doing(self, what: str | None) -> None:
        """Say what runs from now on; None: nothing that takes long."""
        with self._lock:
            if what is None or self._activity is None or what.partition(",")[0] != self._activity.partition(",")[0]:
                self._since = time.monotonic()
            self._activity = what
        if what is not None and self._ticker is None and self._enabled:
            self._ticker = threading.Thread(target=self._tick, name="gspo-console", daemon=True)
            self._ticker.start()

    def step(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        """Show one training step."""
        if step > 0:
            self._num_steps += 1
            self._seconds += values.get("timing_s/step", 0.0)
        speed = values.get("perf/rollout_throughput", values.get("perf/throughput"))
        row: dict[str, Any] = {**values, "val": held_out_score(values), "speed": speed}
        row |= {"step": _position(step, total).removeprefix("step "), "left": self._left(step, total)}
        if not self.rich.is_terminal:
            self._print(_line(self._columns, row), soft_wrap=True)
            return
        columns = _fitting(self._columns, self.rich.width)
        if self._num_rows == 0 or (self.every and self._num_rows % self.every == 0):
            self._print("  ".join(title.rjust(width) for title, _, _, width, _ in columns), style="bold")
        self._num_rows += 1
        self._print("  ".join(_cell(row.get(key), form).rjust(width) for _, key, form, width, _ in columns))

    def generating(self, step: int, total: int | None, kept: int, needed: int) -> None:
        """Show how far the next batch is."""
        self.doing(f"{_position(step, total)}: generating, {kept} of {needed} groups kept")

    def _left(self, step: int, total: int | None) -> str | None:
        """The time that the remaining steps take at the speed so far."""
        if not total or not self._num_steps:
            return None
        return duration(self._seconds / self._num_steps * (total - step))

    def _print(self, what: Any, *, soft_wrap: bool | None = None, style: str | None = None) -> None:
        with self._lock:
            self._hide()
            wrap = not self.rich.is_terminal if soft_wrap is None else soft_wrap
            self.rich.print(what, markup=False, style=style, soft_wrap=wrap)
            self._printed = time.monotonic()

    def _tick(self) -> None:
        while not self._end.wait(TICK):
            with self._lock:
                if self._activity is None:
                    self._hide()
                    continue
                spent = time.monotonic() - self._since
                if self.rich.is_terminal:
                    self._show(f"{self._activity}, {duration(spent)}")
                elif time.monotonic() - self._printed >= QUIET:
                    self._print(f"{self._activity}, {duration(spent)}", soft_wrap=True)

    def _show(self, line: str) -> None:
        if self._live is None:
            self._live = Live(console=self.rich, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True, style="dim"), refresh=True)

    def _hide(self) -> None:
        """Remove the live line from the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def stop(self) -> None:
        """End the display of what runs now."""
        self._end.set()
        if self._ticker is not None:
            self._ticker.join()
        with self._lock:
            self._ticker, self._activity, self._end = None, None, threading.Event()
            self._hide()

    def side_by_side(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A small table of texts, such as answers before and after training."""
        table = Table(title=title, title_justify="left")
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._print(table)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def _position(step: float, total: int | None) -> str:
    return f"step {step:.0f}" + (f"/{total}" if total else "")


def _cell(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _line(columns: Sequence[Column], row: Mapping[str, Any]) -> str:
    """A step as titles with values."""
    return "  ".join(
        f"{title} {form.format(row[key])}" for title, key, form, _, _ in columns if row.get(key) is not None
    )


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The most important columns that fit into a line of the terminal, in their order."""
    chosen: list[Column] = []
    for column in sorted(columns, key=lambda c: c[4]):
        if sum(c[3] + 2 for c in [*chosen, column]) - 2 <= width - 1:
            chosen.append(column)
    return [column for column in columns if column in chosen]
