"""Writes the records of a run: groups, evaluations, and one row of metrics per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.evaluation.evaluator import Evaluation
from gspo.loop import step_records
from gspo.loop.step_records import TrainedStep
from gspo.metrics import Metrics, merge_metrics
from gspo.runs.clock import Clock
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder
from gspo.runs.group_log import GroupLog
from gspo.runs.sinks import Sink
from gspo.types import Group


class Recorder:
    """Writes to the run folder first, then to the sinks and the console. Groups are written in the background.

    `overlapped`: generation goes on while the policy is trained.
    """

    def __init__(
        self,
        run: RunFolder,
        clock: Clock,
        writer: BackgroundWriter,
        console: Console,
        *,
        save_groups: bool,
        overlapped: bool = False,
    ) -> None:
        self._run, self._clock, self._writer, self._console = run, clock, writer, console
        self._save_groups, self._overlapped = save_groups, overlapped
        self._group_log = GroupLog(run.groups)
        self.sinks: Sequence[Sink] = ()

    def restart(self) -> None:
        """Forget groups that were not written: a run that continues from a checkpoint judges them again."""
        self._group_log = GroupLog(self._run.groups)

    def group(self, group: Group, fate: str, version: int) -> None:
        """Record what the sampler decided about a group. Trained ones are written with the step that trains on them."""
        if self._save_groups and fate not in ("kept", "unfiltered"):
            self._group_log.add(group, fate)

    def groups(self, step: int, done: TrainedStep, token_text: Callable[[int], str]) -> None:
        """Write the groups of a step in the background, before its checkpoint."""
        if not self._save_groups:
            return
        with self._clock("log_groups"):
            judged = self._group_log.take(kept=done.groups)
            texts = {t: token_text(t) for t in done.tokens()}  # here: a tokenizer is not for two threads
        write = functools.partial(step_records.write_groups, self._group_log, step, done, texts, judged)
        self._writer.do("log_groups", write)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write the answers to the held-out prompts. Warns of missing rewards."""
        step_records.write_evaluation(self._run, step, evaluation)
        if (problem := evaluation.problem()) is not None:
            self._console.warn(f"step {step}: {problem}")

    def row(self, step: int, total_steps: int, metrics: Metrics) -> dict[str, float]:
        """Write the row of a step. The clock starts again: time from now on belongs to the next step."""
        merge_metrics(metrics, self._clock.metrics())
        self._clock.reset()
        values = {name: metric.result() for name, metric in metrics.items()}
        values |= step_records.speed(values, overlapped=self._overlapped)
        self._run.append_metrics(step, values)
        for sink in self.sinks:
            self._try_sink(sink, f"step {step} is not logged", functools.partial(sink.log, step, values))
        self._console.step(step, total_steps, values)
        return values

    def close(self) -> None:
        for sink in reversed(self.sinks):
            self._try_sink(sink, "it is not closed", sink.close)

    def _try_sink(self, sink: Sink, loss: str, call: Callable[[], None]) -> None:
        """Call a sink. One that fails is a warning: the row is in the run folder already."""
        try:
            call()
        except Exception as error:
            name = type(sink).__name__
            self._console.warn(f"the sink {name} raised {type(error).__name__}: {error}; {loss}, training goes on")
