"""Training of a reward model on preference pairs (`gspo rm`): a run whose step is one update on pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo.build.supervised.preferences import PreferenceParts, build_preferences
from gspo.loop.supervised import SupervisedTrainer, mean_of
from gspo.metrics import Metric, Metrics
from gspo.runs.console import PREFERENCE_COLUMNS

MEAN_STEPS = 10  # of the losses in the result


class RewardModelTrainer(SupervisedTrainer):
    """Trains a reward model: `RewardModelTrainer(cfg, train_dataset=…, val_dataset=…, out=…).fit()`.

    Rows have a `prompt`, a `chosen` and a `rejected` answer. The folder `out`, and every checkpoint, is an ordinary
    classifier with one label, with the mean and standard deviation of its held-out scores in `config.json`.
    """

    command, name_prefix = "rm", "rm-"
    columns = PREFERENCE_COLUMNS
    parts: PreferenceParts

    def _build(self, weights_from: Path | None) -> PreferenceParts:
        return build_preferences(self.config, self.inputs, weights_from=weights_from)

    def _train_and_measure(self) -> Metrics:
        with self.clock("data"):
            pairs = self.parts.order.batch(self.step)
        self.writer.wait()  # the checkpoint of the last step is made of the weights that change now
        with self.clock("update_actor"):
            metrics = self.parts.model.update(pairs, step=self.step)
        self.step += 1
        counts = {
            "train/tokens": Metric("sum", sum(pair.num_tokens for pair in pairs)),
            "train/epoch": Metric("last", self.step * len(pairs) / len(self.parts.order.examples)),
        }
        return metrics | counts

    def _evaluate(self) -> Metrics:
        """Loss and accuracy on the held-out pairs, whose scores become the model's saved mean and deviation."""
        held_out: Any = self.parts.held_out
        if not held_out:
            return {}
        with self.clock("testing"):
            metrics, scores = self.parts.model.evaluate(held_out)
        facts = self.parts.model.model.config
        facts.reward_mean, facts.reward_std = float(scores.mean()), float(scores.std())
        return metrics

    def result(self) -> dict[str, Any]:
        rows = list(self.run.rows())
        losses, held_out = ([row[name] for row in rows if name in row] for name in ("train/loss", "val/accuracy"))
        signs = [row["val/sign_accuracy"] for row in rows if "val/sign_accuracy" in row]
        return {
            "out": str(self._out or self.run.checkpoints / f"step-{self.step:06d}"),
            "steps": self.step,
            "num_pairs": len(self.parts.order.examples),
            "first_loss": mean_of(losses[:MEAN_STEPS]),
            "last_loss": mean_of(losses[-MEAN_STEPS:]),
            "start_accuracy": held_out[0] if held_out else None,
            "accuracy": held_out[-1] if held_out else None,
            "sign_accuracy": signs[-1] if signs else None,
            "skipped_steps": sum(row.get("actor/skipped_updates", 0) > 0 for row in rows),
            "seconds": round(self.counters.seconds, 1),
            "run": str(self.run.path),
        }
