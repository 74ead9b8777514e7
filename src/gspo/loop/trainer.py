"""The loop: sample, score, compute advantages, update, publish, record, save."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gspo.build.role_settings import order_seed
from gspo.build.run import Inputs, RunParts, build, choose_backend
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.contents import CheckpointError
from gspo.checkpoint.resume import Resume, find_resume
from gspo.checkpoint.saver import CheckpointSaver
from gspo.config import ResolvedConfig, TrainerConfig, load
from gspo.distributed.backend import Backend
from gspo.distributed.rank_group import RankFailed
from gspo.distributed.run_layout import runs_ahead
from gspo.loop import ending, recovery, step_records
from gspo.loop.callbacks import Callback, open_callbacks
from gspo.loop.counters import Counters
from gspo.loop.guards.alarms import LR_FACTOR, Alarms, Paused
from gspo.loop.guards.bad_numbers import BadNumbers, check_numbers, skipped_updates
from gspo.loop.guards.stop_request import StopRequest
from gspo.loop.guards.watchdog import Watchdog
from gspo.loop.recorder import Recorder
from gspo.loop.step_records import TrainedStep, measure
from gspo.metrics import Metrics, merge_metrics
from gspo.plugins import import_plugins
from gspo.registry import PluginError
from gspo.runs.clock import Clock
from gspo.runs.console import Console
from gspo.runs.environment import describe
from gspo.runs.files import write_atomic, write_json
from gspo.runs.sinks import RunInfo, Sink, open_sinks
from gspo.sampling.errors import DataExhausted, SamplingError
from gspo.sampling.filters import GroupFilter
from gspo.training.batch.batching import collate
from gspo.training.policy import Update
from gspo.types import AdvantageBatch


class Trainer:
    """Trains by a config: `Trainer(cfg, reward_fn=…, train_dataset=…, val_dataset=…).fit()`.

    `cfg` is a TrainerConfig or what `gspo.load_config` returns. Datasets are lists of rows (dicts in verl's format, or
    gspo.data.Row); without them the config's files are read. `sinks` and `callbacks` add to those that the config
    names; `group_filter` is used where it names none (docs/extend.md). `environment` is a class, a function that makes
    an environment, or a list of functions as tools (docs/environments.md). `backend` replaces the one of
    `trainer.backend`.
    """

    def __init__(
        self,
        cfg: TrainerConfig | ResolvedConfig,
        reward_fn: Any = None,
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
        *,
        val_reward_fn: Any = None,
        tokenizer: Any = None,
        sinks: Sequence[Sink] = (),
        callbacks: Sequence[Callback] = (),
        group_filter: GroupFilter | None = None,
        environment: Any = None,
        console: Console | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.resolved = cfg if isinstance(cfg, ResolvedConfig) else load(base=cfg)
        self.config = self.resolved.config
        self.console = console or Console(every=self.config.trainer.console_table_freq)
        for warning in self.resolved.warnings:
            self.console.warn(str(warning).removeprefix("warning: "))
        self._inputs = Inputs(
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=None if train_dataset is None else list(train_dataset),
            val_dataset=None if val_dataset is None else list(val_dataset),
            tokenizer=tokenizer,
            group_filter=group_filter,
            environment=environment,
        )
        import_plugins(self.config.trainer.plugins)
        self.callbacks = open_callbacks(self.config.trainer.callbacks, callbacks)
        self.clock, self.stop = Clock(), StopRequest()
        self.num_rank_failures = 0  # since the last whole step
        self.backend = backend or choose_backend(self.config)
        resume: Resume = find_resume(self.resolved)
        self.run = resume.run.open()
        try:
            self._open(resume, sinks)
        except BaseException:
            with contextlib.ExitStack() as stack:  # each is called, whatever another raises
                stack.callback(self.run.remove_if_empty)
                stack.callback(self.run.close)
                self._close_parts(stack)
            raise

    def _open(self, resume: Resume, sinks: Sequence[Sink]) -> None:
        for note in resume.notes:
            self.console.say(note)
        trainer = self.config.trainer
        self.alarms = Alarms(self.run, trainer.on_alarm, self.console.warn)
        self.writer = BackgroundWriter(self.clock, self.console.warn)
        self.saver = CheckpointSaver(self.run.checkpoints, self.config, self.clock, self.writer)
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
        write_atomic(self.run.config_file, self.resolved.to_yaml(with_origins=True).encode())
        write_json(self.run.settings_file, self.resolved.records())
        given = self._inputs.facts()
        self.run.write_environment(describe() | ({"inputs": given} if given else {}))
        info = RunInfo(self.run.path, trainer.project_name, self.run.name, self.resolved.to_dict())
        self.recorder.sinks = open_sinks(trainer.logger, info, sinks)

    def assemble(self, loaded: checkpoint.Loaded | None) -> None:
        """Build the parts, and restore the state of a checkpoint where there is one."""
        self.recorder.restart()
        self.parts: RunParts = build(
            self.config,
            self._inputs,
            weights_from=loaded.path if loaded else None,
            backend=self.backend,
            record=self.recorder.group,
            watch=self._watch_sampling,
            folder=self.run.path,
            notify=self.console.warn,
        )
        self.step, self.total_steps, self.counters = 0, self.parts.total_steps, Counters()
        if loaded is not None:
            self._restore(loaded)
        self.saver.resumed(loaded)
        self.run.cut_after(self.step or -1)  # step 0 is evaluated again
        self.alarms.restore(self.step, list(self.run.rows()))
        self.counters.rollbacks = max(self.counters.rollbacks, self.alarms.num_rollbacks())
        self.parts.roles.scale_lr(LR_FACTOR**self.counters.rollbacks)

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
        if self.step == 0 and self.config.trainer.val_before_train and self.parts.evaluator is not None:
            self._record_row(self._evaluate())
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
        if self.config.trainer.val_after_train and not ending.is_evaluated(self.run, self.step):
            self.run.amend_metrics(self.step, {k: m.result() for k, m in self._evaluate().items()})
        num_examples = self.config.trainer.log_val_generations
        return ending.finished(self.console, self.run, self.step, self.counters, num_examples)

    def train_step(self) -> None:
        """One training step. Its records are written while the next one generates."""
        done = self._train()
        self.step += 1
        metrics = measure(done, self.parts, self.counters)
        step_records.warn_of_failures(self.step, done.sampling, self.console.warn)
        self.recorder.groups(self.step, done, self.parts.token_text)
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
        if action == "pause":
            key = f"trainer.on_alarm={self.config.trainer.on_alarm}"
            raise Paused(f"an alarm paused the run at step {self.step} ({key})")
        self.counters.count_step(bad=skipped_updates(metrics))
        limit = self.config.trainer.max_skipped_steps
        check_numbers(self.step, metrics, self.counters.bad_steps_in_row, limit, self.console.warn)
        try:
            self.callbacks.on_step_end(self, self.step, values)
        except PluginError:  # the step itself is whole
            self._save_unless_saved()
            raise
        if self._save_is_due():
            self._begin_save()

    def _train(self) -> TrainedStep:
        """From prompts to new weights, stage by stage."""
        parts, roles, clock = self.parts, self.parts.roles, self.clock
        with clock("gen"):
            groups, sampling = parts.sampler.next_batch()
            parts.engine.rest()
        with clock("old_log_prob"):
            c, seed = self.config.algorithm, order_seed(self.config, self.step)
            masks = {"mask_truncated": c.mask_truncated, "mask_malformed": c.mask_malformed_turns}
            batch = roles.policy.score(collate(groups, seed, **masks))
        if roles.reference is not None and self.config.actor_rollout_ref.actor.use_kl_loss:
            with clock("ref"):
                batch = roles.reference.score(batch)
        if roles.critic is not None:
            with clock("values"):
                batch = roles.critic.score(batch)
        baselines, extra = None, {}
        if parts.baseline is not None:
            with clock("baseline"):
                baselines, extra = parts.baseline.score(groups, self.step)
        with clock("adv"):
            weights = step_records.row_weights(groups, sampling.weights)
            batch = parts.objective.with_advantages(batch, weights, baselines)
        self.writer.wait()  # the checkpoint of the last step is made of the weights that change now
        if roles.critic is not None:
            with clock("update_critic"):
                extra |= roles.critic.update(batch, step=self.step)
        with clock("update_actor"):
            update = self._update_policy(batch)
        with clock("update_weights"):
            parts.engine.load_weights(None, version=self.step + 1)
            parts.sampler.release(groups)
        return TrainedStep(groups, sampling, update, extra)

    def _update_policy(self, batch: AdvantageBatch) -> Update:
        """Train the policy, unless only the critic is trained yet (`trainer.critic_warmup`)."""
        objective, roles = self.parts.objective, self.parts.roles
        if roles.critic is not None and self.step < self.config.trainer.critic_warmup:
            log_probs, entropy = roles.policy.log_probs(batch)  # the weights stay, so this is π_old as well
            rows = list(batch.unscored_rows)
            return Update({}, log_probs, batch.with_rows(rows, log_probs[rows], entropy[rows]))
        return roles.update_policy(batch, objective.loss(), step=self.step, regulariser=objective.regulariser)

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

    def _evaluate(self) -> Metrics:
        """The metrics of the held-out prompts; {} without any."""
        if self.parts.evaluator is None:
            return {}
        with self.clock("testing"):
            evaluation = self.parts.evaluator.run(self.step)
            self.recorder.evaluation(self.step, evaluation)
        self.callbacks.on_evaluate(self, self.step, evaluation)
        return dict(evaluation.metrics)

    def finish_early(self, reason: str) -> None:
        """End the run after this step as if it were the last one: with a checkpoint, an evaluation and a report."""
        self.console.say(reason)
        self.total_steps = self.step

    def save(self) -> None:
        """Write a checkpoint of this step boundary. Returns when it is on disk."""
        self._begin_save()
        self.writer.wait()

    def _begin_save(self) -> None:
        self.saver.begin(self.step, self.parts.roles, self.parts.tokenizer, self._state)
        self.callbacks.on_save(self, self.step)

    def _save_is_due(self) -> bool:
        return self.step == self.total_steps or self.stop.signal is not None or self.saver.is_due(self.step)

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
        parts.check_fingerprint(state["fingerprint"])
        self.step = loaded.step
        for note in parts.roles.load(loaded, reset=self.config.trainer.resume_missing == "reset"):
            self.console.warn(note)
        parts.engine.load_weights(None, version=self.step)
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

    def _watch_sampling(self, kept: int, needed: int) -> None:
        self.clock.beat()
        self.console.generating(self.step + 1, self.total_steps, kept, needed)

    def close(self) -> None:
        """Close everything, whatever one of them raises; the lock on the run folder last."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.run.close)
            self._close_parts(stack)
            stack.callback(self.recorder.close)
            stack.callback(self.writer.close)
            self.console.stop()

    def _close_parts(self, stack: contextlib.ExitStack) -> None:
        if self.backend is not None:
            stack.callback(self.backend.close)
        if hasattr(self, "parts"):  # not where new ones could not be built
            stack.callback(self.parts.close)
