"""Supervised training: a run whose steps train on the answers of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gspo.build.data.given import Inputs
from gspo.build.supervised.examples import SupervisedParts, build_supervised
from gspo.config import ResolvedConfig, TrainerConfig, load_supervised
from gspo.data.rows import DataError
from gspo.distributed.backend import Backend
from gspo.loop import ending
from gspo.loop.callbacks import Callback
from gspo.loop.export import export_model
from gspo.loop.guards.alarms import SUPERVISED_RULES
from gspo.loop.training_run import TrainingRun
from gspo.metrics import Metric, Metrics, merge_metrics
from gspo.runs.console import SUPERVISED_COLUMNS, Console
from gspo.runs.files import write_json
from gspo.runs.metric_names import held_out_accuracy
from gspo.runs.sinks import Sink
from gspo.training.sft import answer_batch, answer_loss, held_out_loss
from gspo.types import AdvantageBatch

MEAN_STEPS = 10  # of the losses in the result


class SupervisedTrainer(TrainingRun[SupervisedParts]):
    """Trains on answers: `SupervisedTrainer(cfg, train_dataset=…, val_dataset=…, out=…).fit()`.

    `cfg` is a TrainerConfig, or what `gspo.config.load_supervised` or `gspo.load_config` returns. Datasets are lists of
    rows with answers; without them the config's files are read. The trained model is also written to `out`, a new or
    empty folder.
    """

    command, name_prefix = "sft", "sft-"
    alarm_rules = SUPERVISED_RULES
    columns = SUPERVISED_COLUMNS

    def __init__(
        self,
        cfg: TrainerConfig | ResolvedConfig,
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
        *,
        out: str | Path | None = None,
        reward_fn: Any = None,
        tokenizer: Any = None,
        sinks: Sequence[Sink] = (),
        callbacks: Sequence[Callback] = (),
        console: Console | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._out = None if out is None else Path(out)
        _check_empty(self._out)
        inputs = Inputs(
            reward_fn=reward_fn,
            train_dataset=None if train_dataset is None else list(train_dataset),
            val_dataset=None if val_dataset is None else list(val_dataset),
            tokenizer=tokenizer,
        )
        self._made: tuple[int, AdvantageBatch] | None = None  # the latest batch and its step
        resolved = cfg if isinstance(cfg, ResolvedConfig) and cfg.for_sft else load_supervised(base=cfg)
        every = resolved.config.trainer.console_table_freq
        console = console or Console(every=every, columns=self.columns)
        super().__init__(resolved, inputs, sinks=sinks, callbacks=callbacks, console=console, backend=backend)

    def _build(self, weights_from: Path | None) -> SupervisedParts:
        return build_supervised(
            self.config, self.inputs, weights_from=weights_from, backend=self.backend, progress=self.console.doing
        )

    def _train_and_measure(self) -> Metrics:
        roles, following = self.parts.roles, self.step + 1
        with self.clock("data"):
            batch = self._batch(self.step)
        self.writer.wait()  # the checkpoint of the last step is made of the weights that change now
        with self.clock("update_actor"):
            upcoming = (lambda: self._batch(following)) if following < self.total_steps else None
            update = roles.update_policy(batch, answer_loss, step=self.step, upcoming=upcoming)
        self.step = following
        num_answer = sum(map(len, batch.response_ids))
        counts = {
            "train/tokens": Metric("sum", num_answer + sum(map(len, batch.prompt_ids))),
            "train/answer_tokens": Metric("sum", num_answer),
            "train/epoch": Metric("last", self.step * batch.num_sequences / len(self.parts.order.examples)),
        }
        return update.metrics | counts

    def _batch(self, step: int) -> AdvantageBatch:
        """The batch of a step. The latest is kept: an update asks for the next one ahead of time."""
        if self._made is None or self._made[0] != step:
            self._made = step, answer_batch(self.parts.order.batch(step))
        return self._made[1]

    def _evaluate(self) -> Metrics:
        parts = self.parts
        if not parts.held_out:
            return {}
        with self.clock("testing"):
            metrics = held_out_loss(parts.roles.policy, parts.held_out, self.config.data.train_batch_size)
        if parts.evaluator is not None and parts.engine is not None:
            with self.clock("testing"):
                parts.publish(self.step)
                evaluation = parts.evaluator.run(self.step)
                parts.engine.rest()
                self.recorder.evaluation(self.step, evaluation)
            self.callbacks.on_evaluate(self, self.step, evaluation)
            merge_metrics(metrics, evaluation.metrics)
        return metrics

    def _is_evaluated(self) -> bool:
        return any(row["step"] == self.step and "val/loss" in row for row in self.run.rows())

    def result(self) -> dict[str, Any]:
        rows = list(self.run.rows())
        losses, held_out = ([row[name] for row in rows if name in row] for name in ("train/loss", "val/loss"))
        accuracies = [a for row in rows if (a := held_out_accuracy(row)) is not None]
        return {
            "out": str(self._out or self.run.checkpoints / f"step-{self.step:06d}"),
            "steps": self.step,
            "num_examples": len(self.parts.order.examples),
            "first_loss": mean_of(losses[:MEAN_STEPS]),
            "last_loss": mean_of(losses[-MEAN_STEPS:]),
            "start_val_loss": held_out[0] if held_out else None,
            "val_loss": held_out[-1] if held_out else None,
            **({"start_acc": accuracies[0], "final_acc": accuracies[-1]} if accuracies else {}),
            "skipped_steps": sum(row.get("actor/skipped_updates", 0) > 0 for row in rows),
            "seconds": round(self.counters.seconds, 1),
            "run": str(self.run.path),
        }

    def _finish(self) -> dict[str, Any]:
        if self._out is not None:
            export_model(self.run.checkpoints / f"step-{self.step:06d}", self._out)
        result = self.result()
        write_json(self.run.result_file, result)
        ending.write_report(self.console, self.run)
        return result


def _check_empty(out: Path | None) -> None:
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out}", "exists and is not an empty folder; give a new one")


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are finite numbers; rows store others as null."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
