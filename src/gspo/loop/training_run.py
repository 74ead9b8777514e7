"""A run: its folder, records, evaluation, checkpoints, resume and guards, around the steps of a trainer."""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from gspo.build.data.given import Inputs
from gspo.build.data.rows import held_out_share
from gspo.build.parts import Parts
from gspo.build.run import choose_backend
from gspo.build.sizes import decide_sizes
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.contents import CheckpointError
from gspo.checkpoint.resume import Resume, find_resume
from gspo.checkpoint.saver import CheckpointSaver
from gspo.config import ResolvedConfig
from gspo.distributed.backend import Backend
from gspo.distributed.rank_group import RankFailed
from gspo.distributed.run_layout import runs_ahead
from gspo.loop import ending, recovery
from gspo.loop.best import best_steps, held_out_figure, why_stop
from gspo.loop.callbacks import Callback, open_callbacks
from gspo.loop.counters import Counters
from gspo.loop.guards.alarms import LR_FACTOR, RULES, Alarms, Paused
from gspo.loop.guards.bad_numbers import BadNumbers, check_numbers, skipped_updates
from gspo.loop.guards.stop_request import StopRequest
from gspo.loop.guards.watchdog import Watchdog
from gspo.loop.recorder import Recorder
from gspo.loop.stage_words import stage_text
from gspo.metrics import Metrics, merge_metrics
from gspo.plugins import import_plugins
from gspo.registry import PluginError
from gspo.runs.clock import Clock
from gspo.runs.console import Console
from gspo.runs.environment import describe
from gspo.runs.files import write_atomic, write_json
from gspo.runs.sinks import RunInfo, Sink, open_sinks
from gspo.sampling.errors import DataExhausted, SamplingError

P = TypeVar("P", bound=Parts)


class TrainingRun(ABC, Generic[P]):
    """One run from its config to its result. Subclasses build its parts, train a step and evaluate."""

    command = "train"  # of gspo
    name_prefix = ""  # of runs without a name
    alarm_rules = RULES

    def __init__(
        self,
        resolved: ResolvedConfig,
        inputs: Inputs,
        *,
        sinks: Sequence[Sink] = (),
        callbacks: Sequence[Callback] = (),
        console: Console | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.resolved, self.inputs = resolved, inputs
        self.config = self.resolved.config
        self.console = console or Console(every=self.config.trainer.console_table_freq)
        for warning in self.resolved.warnings:
            self.console.warn(str(warning).removeprefix("warning: "))
        import_plugins(self.config.trainer.plugins)
        self.callbacks = open_callbacks(self.config.trainer.callbacks, callbacks)
        self.clock, self.stop = Clock(self._show_stage), StopRequest()
        self.step = self.total_steps = self._first_step = 0
        self.num_rank_failures = 0  # since the last whole step
        self.backend = backend or choose_backend(self.config)
        with contextlib.ExitStack() as failed:  # each is called, whatever another raises
            failed.callback(self.console.stop)
            resume: Resume = find_resume(self.resolved, self.name_prefix)
            self.resolved = resume.resolved if resume.checkpoint else self._with_sizes(resume.resolved)
            self.config = self.resolved.config
            self.run = resume.run.open()
            failed.callback(self.run.remove_if_empty)
            failed.callback(self.run.close)
            failed.callback(self._end_parts)
            self._open(resume, sinks)
            failed.pop_all()

    def _with_sizes(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """The config of a new run, with the sizes that nobody set adapted to its data and this machine."""
        self.console.doing("reading the data")
        inputs = self.inputs
        sizes = decide_sizes(resolved, inputs.train_dataset, inputs.tokenizer, inputs.environment)
        for note in sizes.notes:
            self.console.say(note)
        for warning in sizes.warnings:
            self.console.warn(warning)
        return sizes.resolved

    def _show_stage(self, stage: str | None) -> None:
        """Let the console say what runs now."""
        if stage is None:
            self.console.doing(None)
            return
        self.console.doing(stage_text(stage, self.step, self.total_steps, is_first=self.step == self._first_step))

    def _open(self, resume: Resume, sinks: Sequence[Sink]) -> None:
        for note in resume.notes:
            self.console.say(note)
        trainer = self.config.trainer
        self.alarms = Alarms(self.run, trainer.on_alarm, self.console.warn, self.alarm_rules)
        self.writer = BackgroundWriter(self.clock, self.console.warn)
        self.saver = CheckpointSaver(self.run.checkpoints, self.config, self.clock, self.writer, self._best)
        self.recorder = Recorder(
            self.run,
            self.clock,
            self.writer,
            self.console,
            save_groups=trainer.save_groups,
            overlapped=runs_ahead(self.config),
        )
        recovery.assemble_newest(self, resume)
        self._started = time.monotonic()
        info = RunInfo(self.run.path, trainer.project_name, self.run.name, self.resolved.to_dict())
        self.recorder.sinks = open_sinks(trainer.logger, info, sinks)  # before files are written: one may be refused
        write_atomic(self.run.config_file, self.resolved.to_yaml(with_origins=True).encode())
        write_json(self.run.settings_file, self.resolved.records())
        given = self.inputs.facts(held_out_share(self.config))
        held_out = getattr(self.parts, "held_out", None)
        facts = {"inputs": given, "held_out": held_out if isinstance(held_out, dict) else {}}
        self.run.write_environment(describe() | {name: value for name, value in facts.items() if value})

    def assemble(self, loaded: checkpoint.Loaded | None) -> None:
        """Build the parts, and restore the state of a checkpoint where there is one."""
        self.recorder.restart()
        self.parts: P = self._build(loaded.path if loaded else None)
        self.step, self.total_steps, self.counters = 0, self.parts.total_steps, Counters()
        if loaded is not None:
            self._restore(loaded)
        self.saver.resumed(loaded)
        self.run.cut_after(self.step or -1)  # step 0 is evaluated again
        self.alarms.restore(self.step, self.run.rows())
        self.counters.rollbacks = max(self.counters.rollbacks, self.alarms.num_rollbacks())
        self.parts.roles.scale_lr(LR_FACTOR**self.counters.rollbacks)
        self._first_step = self.step

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until a signal or an alarm stops it. Returns what `gspo train` prints as its last line."""
        self._started = time.monotonic() - self.counters.seconds
        if self.step < self.total_steps:  # a finished run that was made longer is unfinished again
            self.run.result_file.unlink(missing_ok=True)
        with contextlib.closing(self), self.stop, self._watchdog(), self.writer:
            self.console.say(self.parts.summary(self.run.path, self.total_steps))
            self.clock.reset()
            self.callbacks.on_train_begin(self)
            result = self._run()
            self.callbacks.on_train_end(self, result)
            return result

    def _run(self) -> dict[str, Any]:
        if self.step == 0 and self.config.trainer.val_before_train and (metrics := self._evaluate()):
            self.alarms.restore(0, [{**self._record_row(metrics), "step": 0}])
        self._stop_early()  # a run that ended early, started again
        try:
            while self.step < self.total_steps and self.stop.signal is None:
                try:
                    self.train_step()
                    self.num_rank_failures = 0
                except RankFailed as failure:
                    recovery.replace_ranks(self, failure)
        except DataExhausted as end:
            self.finish_early(str(end))
        except Paused as pause:
            self._save_unless_saved()
            return ending.paused(self, pause)
        except (SamplingError, BadNumbers):  # raised between updates, so the weights are those of a step
            self._save_unless_saved()
            raise
        self._save_unless_saved()
        if self.stop.signal is not None and self.step < self.total_steps:
            return ending.stopped(self)
        if self.config.trainer.val_after_train and not self._is_evaluated():
            self.run.amend_metrics(self.step, {k: m.result() for k, m in self._evaluate().items()})
        return self._finish()

    def train_step(self) -> None:
        """One training step. Its records are written while the next one begins."""
        metrics = self._train_and_measure()
        if self._evaluation_is_due():
            try:
                merge_metrics(metrics, self._evaluate())
            except Exception as error:
                self._keep_step(metrics, error)
                raise
        values = self._record_row(metrics)
        action = self.alarms.check(self.step, values, self.counters.rollbacks)
        if action == "rollback":
            recovery.roll_back(self)
            return
        self.counters.count_step(bad=skipped_updates(metrics))
        if action == "pause":
            key = f"trainer.on_alarm={self.config.trainer.on_alarm}"
            raise Paused(f"an alarm paused the run at step {self.step} ({key})")
        limit = self.config.trainer.max_skipped_steps
        check_numbers(self.step, metrics, self.counters.bad_steps_in_row, limit, self.console.warn)
        try:
            self.callbacks.on_step_end(self, self.step, values)
        except PluginError:  # the step itself is whole
            self._save_unless_saved()
            raise
        if held_out_figure(values, self.config.trainer.early_stop.metric) is not None:
            self._stop_early()
        if self._save_is_due():
            self._begin_save()

    @abstractmethod
    def _build(self, weights_from: Path | None) -> P:
        """The parts of the run, with the weights of a checkpoint where one is given."""

    @abstractmethod
    def _train_and_measure(self) -> Metrics:
        """Train one step, count it in `step`, and return its metrics."""

    @abstractmethod
    def _evaluate(self) -> Metrics:
        """The metrics of the held-out data; {} without any."""

    @abstractmethod
    def _is_evaluated(self) -> bool:
        """Whether the evaluation of this step is in the run folder."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The outcome of the run up to this step, from its metric rows: the same after any number of interruptions."""

    @abstractmethod
    def _finish(self) -> dict[str, Any]:
        """Write the result of the finished run and its report. Returns the result."""

    def _keep_step(self, metrics: Metrics, error: Exception) -> None:
        """Record and save a step whose evaluation failed, so that it is not trained again. Lost ranks cannot save."""
        if isinstance(error, RankFailed):
            return
        self._record_row(metrics)
        self.counters.count_step(bad=skipped_updates(metrics))
        self._save_unless_saved()

    def _record_row(self, metrics: Metrics) -> dict[str, float]:
        values = self.recorder.row(self.step, self.total_steps, metrics)
        self.counters.seconds = time.monotonic() - self._started
        return values

    def _evaluation_is_due(self) -> bool:
        trainer, last = self.config.trainer, self.step == self.total_steps
        return trainer.val_after_train if last else trainer.test_freq > 0 and self.step % trainer.test_freq == 0

    def _stop_early(self) -> None:
        """End the run where it no longer improves (`trainer.early_stop`)."""
        settings = self.config.trainer.early_stop
        reason = why_stop(list(self.run.rows()), settings) if settings.patience and self.step else None
        if reason is not None and self.step < self.total_steps:
            self.finish_early(reason)

    def finish_early(self, reason: str) -> None:
        """End the run after this step as if it were the last one: with a checkpoint, an evaluation and a report."""
        self.console.say(reason)
        self.total_steps = self.step

    def save(self) -> None:
        """Write a checkpoint of this step boundary. Returns when it is on disk."""
        self._begin_save()
        self.writer.wait()

    def _begin_save(self) -> None:
        self.run.sync_metrics()
        self.saver.begin(self.step, self.parts.roles, self.parts.tokenizer, self._state)
        self.callbacks.on_save(self, self.step)

    def _save_is_due(self) -> bool:
        last = self.step == self.total_steps or self.stop.signal is not None
        return last or self.saver.is_due(self.step) or self.step in self._best()

    def _best(self, among: Collection[int] | None = None) -> list[int]:
        """The steps, of all or of those given, whose checkpoints `trainer.keep_best` keeps."""
        count = self.config.trainer.keep_best
        return best_steps(self.run.rows(), count, among) if count else []

    def _save_unless_saved(self) -> None:
        self.writer.wait()
        if self.saver.saved != self.step:
            self.save()

    def _state(self) -> dict[str, Any]:
        """The state of a checkpoint besides tensors, and facts about its run."""
        callbacks = self.callbacks.state_dict()
        return {
            **self.parts.state_dict(),
            "counters": self.counters.state_dict(),
            "config": self.resolved.to_dict(),
            "fingerprint": self.parts.fingerprint,
            "without_state": self.parts.roles.without_state(),
            **({"callbacks": callbacks} if callbacks else {}),
        }

    def _restore(self, loaded: checkpoint.Loaded) -> None:
        parts, state = self.parts, loaded.state
        for note in parts.check_fingerprint(state["fingerprint"]):
            self.console.say(note)
        self.step = loaded.step
        for note in parts.roles.load(loaded, reset=self.config.trainer.resume_missing == "reset"):
            self.console.warn(note)
        parts.publish(self.step)
        try:
            parts.load_state_dict(state)
            self.counters.load_state_dict(state["counters"])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{loaded.path}: training/state.json cannot be restored ({cause})") from error
        self.callbacks.load_state_dict(state.get("callbacks", {}))

    def rebuild(self, path: Path) -> None:
        """Continue from a checkpoint with new parts. The old ones go first, so that no device holds two models."""
        self.writer.wait()
        loaded = checkpoint.load(path)
        self.drop_parts()
        self.assemble(loaded)

    def drop_parts(self) -> None:
        """Close and forget the parts, if there are any."""
        if not hasattr(self, "parts"):
            return
        try:
            self.parts.close()
        finally:
            del self.parts
        gc.collect()  # modules and their hooks refer to each other

    def _watchdog(self) -> Watchdog:
        trainer = self.config.trainer
        return Watchdog(
            self.clock,
            self.run.path,
            seconds=trainer.watchdog_seconds,
            stop_seconds=trainer.watchdog_stop_seconds,
            warn=self.console.warn,
            stacks=lambda: self.parts.stacks(),
            kill=lambda: self.parts.kill(),
        )

    def close(self) -> None:
        """Close everything, whatever one of them raises; the lock on the run folder last."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.run.close)
            self._close_parts(stack)
            stack.callback(self.recorder.close)
            stack.callback(self.writer.close)
            self.console.stop()

    def _end_parts(self) -> None:
        with contextlib.ExitStack() as stack:
            self._close_parts(stack)

    def _close_parts(self, stack: contextlib.ExitStack) -> None:
        if self.backend is not None:
            stack.callback(self.backend.close)
        if hasattr(self, "parts"):  # not where new ones could not be built
            stack.callback(self.parts.close)
