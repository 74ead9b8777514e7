"""The loop: sample, score, compute advantages, update, publish, record, save."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.build.role_settings import order_seed
from gspo.build.run import RunParts, build, choose_backend
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.resume import Resume, find_resume
from gspo.checkpoint.saver import CheckpointSaver
from gspo.config import ResolvedConfig, TrainerConfig, load
from gspo.distributed.backend import Backend
from gspo.distributed.rank_group import RankFailed
from gspo.evaluation.evaluator import Evaluation
from gspo.exit_codes import EXIT_PAUSED
from gspo.loop import ending as closing
from gspo.loop import step_records as records
from gspo.loop.counters import Counters
from gspo.loop.guards.alarms import LR_FACTOR, Alarms, Paused, checkpoint_before
from gspo.loop.guards.bad_numbers import BadNumbers as BadNumbers
from gspo.loop.guards.bad_numbers import check_numbers, skipped_updates
from gspo.loop.guards.stop_request import StopRequest
from gspo.loop.guards.watchdog import Watchdog
from gspo.loop.step_records import Trained
from gspo.runs.clock import Clock
from gspo.runs.console import Console
from gspo.runs.environment import describe
from gspo.runs.files import write_atomic
from gspo.runs.group_log import GroupLog
from gspo.runs.sinks import open_sinks
from gspo.sampling.errors import DataExhausted, SamplingError
from gspo.training.batch.batching import collate
from gspo.training.policy import Update
from gspo.types import AdvantageBatch, Group, Metrics, merge_metrics

RANK_RESTARTS = 3  # trainer ranks replaced without a step in between


class Trainer:
    """Trains as a config says: `Trainer(cfg, reward_fn=…, train_dataset=…, val_dataset=…).fit()`.

    `cfg` is a TrainerConfig or what `gspo.config.load` returns. Datasets are lists of rows (dicts in verl's format,
    or gspo.data.Row); without them those named in the config are used. `backend` replaces the one trainer.backend names.
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
        console: Console | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.resolved = cfg if isinstance(cfg, ResolvedConfig) else load(base=cfg)
        self.config = self.resolved.config
        self.console = console or Console(every=self.config.trainer.console_table_freq)
        for warning in self.resolved.warnings:
            self.console.warn(str(warning).removeprefix("warning: "))
        self.clock = Clock()
        self.stop = StopRequest()
        self._num_rank_failures = 0
        self._backend = backend or choose_backend(self.config)
        resume: Resume = find_resume(self.resolved)
        self.run = resume.run.open()
        try:
            for note in resume.notes:
                self.console.say(note)
            self._given = {
                "reward_fn": reward_fn,
                "val_reward_fn": val_reward_fn,
                "train_dataset": None if train_dataset is None else list(train_dataset),
                "val_dataset": None if val_dataset is None else list(val_dataset),
                "tokenizer": tokenizer,
                "backend": self._backend,
            }
            trainer = self.config.trainer
            self.alarms = Alarms(self.run, trainer.on_alarm, self.console.warn)
            self.writer = BackgroundWriter(self.clock, self.console.warn)
            self.saving = CheckpointSaver(self.run.checkpoints, self.config, self.clock, self.writer)
            self._assemble(resume.checkpoint)
            self._clock_started = time.monotonic()
            write_atomic(self.run.config_file, self.resolved.to_yaml(with_origins=True).encode())
            self.run.write_environment(describe())
            self.sinks = open_sinks(
                list(self.config.trainer.logger),
                folder=self.run.path,
                project=self.config.trainer.project_name,
                run=self.run.name,
                config=self.resolved.to_dict(),
            )
        except BaseException:
            with contextlib.ExitStack() as stack:  # whatever one of them raises
                stack.callback(self.run.remove_if_empty)
                stack.callback(self.run.close)
                if self._backend is not None:
                    stack.callback(self._backend.close)
                if hasattr(self, "parts"):
                    stack.callback(self.parts.close)
            raise

    def _assemble(self, loaded: checkpoint.Loaded | None) -> None:
        """Build the parts and take up the state of a checkpoint, or of the beginning."""
        self.parts: RunParts = build(
            self.config,
            weights_from=loaded.path if loaded else None,
            record=self._record,
            watch=self._watch_sampling,
            folder=self.run.path,
            notify=self.console.warn,
            **self._given,
        )
        self.group_log = GroupLog(self.run.groups)
        self.step = 0
        self.total_steps = self.parts.total_steps
        self.counters = Counters()
        if loaded is not None:
            self._restore(loaded)
        self.saving.resumed(loaded)
        self.run.cut_after(self.step or -1)  # step 0 is evaluated again
        self.alarms.restore(self.step, list(self.run.rows()))
        self.counters.rollbacks = max(self.counters.rollbacks, self.alarms.num_rollbacks())
        self.parts.roles.scale_lr(LR_FACTOR**self.counters.rollbacks)

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until asked to stop; returns what the last line of `gspo train` prints."""
        self._clock_started = time.monotonic() - self.counters.seconds
        if self.step < self.total_steps:  # a finished run that was made longer is unfinished again
            self.run.result_file.unlink(missing_ok=True)
        with contextlib.closing(self), self.stop, self._watchdog(), self.writer:
            self.console.say(self.parts.summary(self.run.path, self.total_steps))
            self.clock.reset()
            if self.step == 0:
                self._evaluate_and_track_start()
            try:
                while self.step < self.total_steps and self.stop.signal is None:
                    try:
                        self.train_step()
                        self._num_rank_failures = 0
                    except RankFailed as failure:
                        self._replace_ranks(failure)
            except DataExhausted as end:
                self.console.say(str(end))
                self.total_steps = self.step
            except Paused as pause:
                return self._pause(pause)
            except (SamplingError, BadNumbers):  # raised between updates, so the weights are those of a step
                self._save_unless_saved()
                raise
            if self.stop.signal is not None and self.step < self.total_steps:
                return self._stop_early()
            return self._finish()

    def train_step(self) -> None:
        """One training step. What it leaves behind is written while the next one generates."""
        done = self._train()
        self.step += 1
        metrics = self._measure(done)
        if self.config.trainer.save_groups:
            self._log_groups(done)
        if self._evaluation_is_due():
            merge_metrics(metrics, self._evaluate().metrics)
        values = self._track(metrics)
        action = self.alarms.heed(self.step, values, self.counters.rollbacks)
        if action == "rollback":
            self._roll_back()
            return
        if action == "pause":
            raise Paused(
                f"an alarm paused the run at step {self.step} (trainer.on_alarm={self.config.trainer.on_alarm})"
            )
        self.counters.count_step(bad=skipped_updates(metrics))
        limit = self.config.trainer.max_skipped_steps
        check_numbers(self.step, metrics, self.counters.bad_steps_in_row, limit, self.console.warn)
        if self._save_is_due():
            self._begin_save()

    def _train(self) -> Trained:
        """Stage by stage from nothing to new weights."""
        parts, roles, clock = self.parts, self.parts.roles, self.clock
        with clock("gen"):
            groups, sampling = parts.sampler.next_batch()
            parts.rest_engine()
        with clock("old_log_prob"):
            batch = roles.policy.score(collate(groups, order_seed(self.config, self.step)))
        if roles.reference is not None and self.config.actor_rollout_ref.actor.use_kl_loss:
            with clock("ref"):
                batch = roles.reference.score(batch)
        if roles.critic is not None:
            with clock("values"):
                batch = roles.critic.score(batch)
        baselines, extra = self._greedy_baselines(groups)
        with clock("adv"):
            weights = records.row_weights(groups, sampling.weights)
            batch = parts.objective.with_advantages(batch, weights, baselines)
        self.writer.wait()  # the last step's checkpoint is made of the weights that change now
        if roles.critic is not None:
            with clock("update_critic"):
                extra |= roles.critic.update(batch, step=self.step)
        with clock("update_actor"):
            update = self._update_policy(batch)
        with clock("update_weights"):
            parts.engine.load_weights(None, version=self.step + 1)
            parts.sampler.release(groups)
        return Trained(groups, sampling, update, extra)

    def _measure(self, done: Trained) -> Metrics:
        """The metrics of a step whose weights are live; controllers take note of them."""
        parts = self.parts
        with_gap = self.config.actor_rollout_ref.rollout.calculate_log_probs
        metrics = records.step_metrics(done, with_gap=with_gap)
        merge_metrics(metrics, parts.objective.observe(done.update.metrics))
        merge_metrics(metrics, parts.engine_metrics())
        if parts.kl_reward is not None:
            merge_metrics(metrics, parts.kl_reward.observe())
        merge_metrics(metrics, self.counters.count_tokens(metrics))
        records.warn_of_failures(self.step, done.sampling, self.console.warn)
        return metrics

    def _log_groups(self, done: Trained) -> None:
        """Have the groups of this step written, before its checkpoint."""
        with self.clock("log_groups"):
            judged = self.group_log.take(kept=done.groups)
            texts = {t: self.parts.token_text(t) for t in done.tokens()}  # a tokenizer is not for two threads
        write = functools.partial(records.write_groups, self.group_log, self.step, done, texts, judged)
        self.writer.do("log_groups", write)

    def _greedy_baselines(self, groups: list[Group]) -> tuple[Tensor | None, Metrics]:
        """The baseline of each row where the estimator takes one (remax), and its metrics."""
        if self.parts.baseline is None:
            return None, {}
        with self.clock("baseline"):
            return self.parts.baseline.score(groups, self.step)

    def _update_policy(self, batch: AdvantageBatch) -> Update:
        """Train the policy, unless only the critic is trained yet (`trainer.critic_warmup`)."""
        objective, roles = self.parts.objective, self.parts.roles
        if roles.critic is not None and self.step < self.config.trainer.critic_warmup:
            log_probs, entropy = roles.policy.log_probs(batch)  # the weights stay, so this is π_old as well
            rows = list(batch.unscored_rows)
            return Update({}, log_probs, batch.with_rows(rows, log_probs[rows], entropy[rows]))
        return roles.update_policy(batch, objective.loss(), step=self.step, regulariser=objective.regulariser)

    def save(self) -> None:
        """Write a checkpoint of this step boundary; returns when it is on disk."""
        self._begin_save()
        self.writer.wait()

    def _begin_save(self) -> None:
        self.saving.begin(self.step, self.parts.roles, self.parts.tokenizer, self._state)

    def _state(self) -> dict[str, Any]:
        """What a resume needs beside tensors, and what a checkpoint tells about its run."""
        return {
            **self.parts.state_dict(),
            "counters": self.counters.state_dict(),
            "config": self.resolved.to_dict(),
            "fingerprint": self.parts.fingerprint,
        }

    def close(self) -> None:
        """End everything, whatever one of them raises; the lock on the run folder goes last."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.run.close)
            if self._backend is not None:
                stack.callback(self._backend.close)
            if hasattr(self, "parts"):  # not where new ones could not be built
                stack.callback(self.parts.close)
            for sink in reversed(self.sinks):
                stack.callback(sink.close)
            stack.callback(self.writer.close)
            self.console.stop()

    def _restore(self, loaded: checkpoint.Loaded) -> None:
        parts = self.parts
        parts.check_fingerprint(loaded.state["fingerprint"])
        self.step = loaded.step
        parts.roles.load(loaded)
        parts.engine.load_weights(None, version=self.step)
        parts.load_state_dict(loaded.state)
        self.counters.load_state_dict(loaded.state["counters"])

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

    def _record(self, group: Group, fate: str, version: int) -> None:
        """The sampler's account of a group. Trained ones are logged with their step, so `kept` is passed over."""
        if self.config.trainer.save_groups and fate != "kept":
            self.group_log.add(group, fate)

    def _evaluate_and_track_start(self) -> None:
        if not self.config.trainer.val_before_train or self.parts.evaluator is None:
            return
        self._track(dict(self._evaluate().metrics))

    def _evaluate(self) -> Evaluation:
        if self.parts.evaluator is None:
            return Evaluation([], {}, None, None)
        with self.clock("testing"):
            evaluation = self.parts.evaluator.run(self.step)
            records.write_evaluation(self.run, self.step, evaluation)
        return evaluation

    def _track(self, metrics: Metrics) -> dict[str, float]:
        """One row for this step: to the run folder first, then to whoever watches. Time from now on is the next one's."""
        merge_metrics(metrics, self.clock.metrics())
        self.clock.reset()
        values = {name: metric.result() for name, metric in metrics.items()}
        self.counters.seconds = time.monotonic() - self._clock_started
        values |= records.speed(values)
        self.run.append_metrics(self.step, values)
        for sink in self.sinks:
            sink.log(self.step, values)
        self.console.step(self.step, self.total_steps, values)
        return values

    def _evaluation_is_due(self) -> bool:
        if self.step == self.total_steps:
            return self.config.trainer.val_after_train
        every = self.config.trainer.test_freq
        return every > 0 and self.step % every == 0

    def _save_is_due(self) -> bool:
        last = self.step == self.total_steps or self.stop.signal is not None
        return last or self.saving.is_due(self.step)

    def _save_unless_saved(self) -> None:
        self.writer.wait()
        if self.saving.saved != self.step:
            self.save()

    def _roll_back(self) -> None:
        """Go back to the last checkpoint before this step, with a lower learning rate."""
        path = checkpoint_before(self.run.checkpoints, self.step)
        assert path is not None  # an alarm asks for a rollback only when there is one
        step = self.step
        self._rebuild(path)
        self.console.say(
            f"rolled back from step {step} to {path}; the learning rate is now {LR_FACTOR:g} of what it was"
        )

    def _replace_ranks(self, failure: RankFailed) -> None:
        """Go on from the last checkpoint with new ranks where the backend can start some; else the failure ends the run."""
        self._num_rank_failures += 1
        self.writer.wait()
        path, _ = checkpoint.latest(self.run.checkpoints)
        if self._backend is None or path is None or self._num_rank_failures > RANK_RESTARTS:
            raise failure
        self.console.warn(f"{failure}\nnew trainer ranks go on from {path}")
        failure.with_traceback(None)  # its frames hold the parts
        self._rebuild(path)

    def _rebuild(self, path: Path) -> None:
        """Take up a checkpoint with new parts; the old ones go first, so that no device holds two models."""
        self.writer.wait()
        loaded = checkpoint.load(path)
        try:
            self.parts.close()
        finally:
            del self.parts
        gc.collect()  # modules and their hooks refer to each other
        self._assemble(loaded)

    def _pause(self, pause: Paused) -> dict[str, Any]:
        self._save_unless_saved()
        closing.say_paused(self.console, self.run, str(pause), self.alarms.file.name)
        return {**closing.result(self.run, self.step, self.counters), "stopped": EXIT_PAUSED}

    def _stop_early(self) -> dict[str, Any]:
        self._save_unless_saved()
        closing.say_stopped(self.console, self.run, self.step, self.total_steps)
        return {**closing.result(self.run, self.step, self.counters), "stopped": self.stop.exit_code}

    def _finish(self) -> dict[str, Any]:
        self._save_unless_saved()
        if self.config.trainer.val_after_train and not records.evaluation_file(self.run, self.step).exists():
            evaluation = self._evaluate()
            self.run.amend_metrics(self.step, {k: m.result() for k, m in evaluation.metrics.items()})
        result = closing.result(self.run, self.step, self.counters)
        closing.conclude(self.console, self.run, result, self.config.trainer.log_val_generations)
        return result
