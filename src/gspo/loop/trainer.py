"""The loop: sample, score, compute advantages, update, publish, record, save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gspo.build.data.given import Inputs
from gspo.build.parts import RunParts
from gspo.build.role_settings import order_seed
from gspo.build.run import build
from gspo.config import ResolvedConfig, TrainerConfig, load
from gspo.distributed.backend import Backend
from gspo.loop import ending, step_records
from gspo.loop.callbacks import Callback
from gspo.loop.step_records import TrainedStep, measure
from gspo.loop.training_run import TrainingRun
from gspo.metrics import Metrics
from gspo.runs.console import Console
from gspo.runs.sinks import Sink
from gspo.sampling.filters import GroupFilter
from gspo.training.batch.batching import collate
from gspo.training.policy import Supervision, Update
from gspo.training.sft import example_batch
from gspo.types import AdvantageBatch


class Trainer(TrainingRun[RunParts]):
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
        inputs = Inputs(
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=None if train_dataset is None else list(train_dataset),
            val_dataset=None if val_dataset is None else list(val_dataset),
            tokenizer=tokenizer,
            group_filter=group_filter,
            environment=environment,
        )
        resolved = cfg if isinstance(cfg, ResolvedConfig) else load(base=cfg)
        super().__init__(resolved, inputs, sinks=sinks, callbacks=callbacks, console=console, backend=backend)

    def _build(self, weights_from: Path | None) -> RunParts:
        parts = build(
            self.config,
            self.inputs,
            weights_from=weights_from,
            backend=self.backend,
            record=self.recorder.group,
            watch=self._watch_sampling,
            folder=self.run.path,
            notify=self.console.warn,
            progress=self.console.doing,
        )
        for key, (value, reason) in parts.adapted.items():
            self.console.say(f"{key}={value}, not {self.resolved.get(key)}: {reason}")
            self.resolved = self.resolved.adapted({key: value}, f"auto: {reason}")
            self.config = self.resolved.config
        return parts

    def _train_and_measure(self) -> Metrics:
        done = self._train()
        self.step += 1
        metrics = measure(done, self.parts, self.counters)
        step_records.warn_of_failures(self.step, done.sampling, self.console.warn)
        self.recorder.groups(self.step, done, self.parts.token_text)
        self._stop_at_budget()
        return metrics

    def _stop_early(self) -> None:
        super()._stop_early()
        self._stop_at_budget()  # a run that has spent its budget, started again

    def _stop_at_budget(self) -> None:
        """End the run where its judge has used the tokens that it may (`reward.judge.max_tokens_spent`)."""
        mixed, is_between = self.parts.mixed, 0 < self.step < self.total_steps
        if is_between and mixed is not None and (spent := mixed.over_budget()) is not None:
            self.finish_early(spent)

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
        use_kl_loss = self.config.actor_rollout_ref.actor.use_kl_loss
        if roles.reference is not None and (use_kl_loss or parts.objective.distills):
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
        examples, beside = self.parts.examples, None
        if examples is not None:
            beside = Supervision(
                example_batch(examples.batch(self.step)), self.config.actor_rollout_ref.actor.sft_weight
            )
        return roles.update_policy(
            batch, objective.loss(), step=self.step, regulariser=objective.regulariser, beside=beside
        )

    def _evaluate(self) -> Metrics:
        if self.parts.evaluator is None:
            return {}
        with self.clock("testing"):
            evaluation = self.parts.evaluator.run(self.step)
            self.recorder.evaluation(self.step, evaluation)
        self.callbacks.on_evaluate(self, self.step, evaluation)
        return dict(evaluation.metrics)

    def _is_evaluated(self) -> bool:
        return step_records.evaluation_file(self.run, self.step).exists()

    def result(self) -> dict[str, Any]:
        return ending.result(self.run, self.step, self.counters)

    def _finish(self) -> dict[str, Any]:
        return ending.finished(self.console, self.run, self.result(), self.config.trainer.log_val_generations)

    def _watch_sampling(self, kept: int, needed: int) -> None:
        self.clock.beat()
        self.console.generating(self.step + 1, self.total_steps, kept, needed)
