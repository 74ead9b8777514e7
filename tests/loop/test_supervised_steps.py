"""Steps and results of supervised runs and of reward models, in numbers, with models that only note their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.data.examples import Example
from gspo.data.rows import DataError
from gspo.loop.counters import Counters
from gspo.loop.preferences import RewardModelTrainer
from gspo.loop.supervised import SupervisedTrainer, mean_of
from gspo.metrics import Metric
from gspo.runs.clock import Clock
from gspo.runs.folder import RunFolder
from gspo.training.sft import answer_loss
from gspo.types import Prompt

LOSSES = [float(number) for number in range(1, 13)]  # of twelve steps


class Order:
    """Two examples for every step, of five in all."""

    def __init__(self) -> None:
        self.examples = [0] * 5
        self.asked: list[int] = []

    def batch(self, step: int) -> list[Any]:
        self.asked.append(step)
        sizes = ((3, 2), (1, 1 + step))
        return [Example(Prompt("p", (), (1,) * n), (2,) * m) for n, m in sizes]


def make(kind: type, run: RunFolder, step: int = 0, out: Any = None, **parts: Any) -> Any:
    """A trainer without its start."""
    trainer = object.__new__(kind)
    trainer.run, trainer.step, trainer.total_steps, trainer._out, trainer._made = run, step, 3, out, None
    trainer.counters, trainer.clock = Counters(seconds=12.34), Clock()
    trainer.writer = SimpleNamespace(wait=lambda: None)
    trainer.parts = SimpleNamespace(order=Order(), **parts)
    return trainer


def test_the_result_has_means_of_ten_losses_and_the_ends_of_the_evaluations(run):
    run.append_metrics(0, {"val/loss": 9.0, "val-core/a/acc/mean@1": 0.25})
    for step, loss in enumerate(LOSSES, 1):
        values = {"train/loss": float("nan") if step == 2 else loss, "actor/skipped_updates": float(step == 2)}
        run.append_metrics(step, values | ({"val/loss": 8.0, "val-core/a/acc/mean@1": 0.5} if step == 6 else {}))
    run.amend_metrics(12, {"val/loss": 7.0, "val-core/a/acc/mean@1": 0.75})
    assert (
        make(SupervisedTrainer, run, 12).result()
        == {
            "out": str(run.checkpoints / "step-000012"),
            "steps": 12,
            "num_examples": 5,
            "first_loss": (sum(LOSSES[:10]) - 2) / 9,  # of those that were finite
            "last_loss": sum(LOSSES[2:]) / 10,
            "start_val_loss": 9.0,
            "val_loss": 7.0,
            "start_acc": 0.25,
            "final_acc": 0.75,
            "skipped_steps": 1,
            "seconds": 12.3,
            "run": str(run.path),
        }
    )


def test_a_run_without_steps_or_evaluations_has_a_result(run):
    got = make(SupervisedTrainer, run, out="there").result()
    assert got["out"] == "there" and "final_acc" not in got
    assert (got["first_loss"], got["last_loss"], got["start_val_loss"], got["val_loss"]) == (None,) * 4
    assert mean_of([]) is None and mean_of([None]) is None and mean_of([1.0, None, 2.0]) == 1.5
    assert mean_of([0.0]) == 0.0 and mean_of([0.0, None, 3.0]) == 1.5
    run.append_metrics(0, {"val/loss": 0.0, "val-core/a/acc/mean@1": 0.0})
    got = make(SupervisedTrainer, run).result()
    assert (got["start_val_loss"], got["val_loss"], got["start_acc"], got["final_acc"]) == (0.0,) * 4


def test_the_result_of_a_reward_model(run):
    run.append_metrics(0, {"val/accuracy": 0.5, "val/sign_accuracy": 0.125})
    for step, loss in enumerate(LOSSES, 1):
        run.append_metrics(step, {"train/loss": loss, "actor/skipped_updates": float(step > 10)})
    run.amend_metrics(12, {"val/accuracy": 0.75, "val/sign_accuracy": 0.25})
    got = make(RewardModelTrainer, run, 12).result()
    assert (got["first_loss"], got["last_loss"]) == (5.5, 7.5)
    assert (got["start_accuracy"], got["accuracy"], got["sign_accuracy"]) == (0.5, 0.75, 0.25)
    assert (got["num_pairs"], got["steps"], got["skipped_steps"], got["seconds"]) == (5, 12, 2, 12.3)


def test_a_step_trains_on_its_batch_makes_the_next_one_ahead_and_counts_tokens(run):
    calls: list[Any] = []

    def update_policy(batch, loss, *, step, upcoming):
        calls.append((batch.response_ids, loss, step, None if upcoming is None else upcoming().response_ids))
        return SimpleNamespace(metrics={"train/loss": Metric("sum", 1.0)})

    trainer = make(SupervisedTrainer, run, roles=SimpleNamespace(update_policy=update_policy))
    rows = [{k: m.result() for k, m in trainer._train_and_measure().items()} for _ in range(3)]
    answers = [[(2, 2), (2,) * (1 + step)] for step in range(3)]
    assert calls == [(answers[step], answer_loss, step, answers[step + 1] if step < 2 else None) for step in range(3)]
    assert trainer.parts.order.asked == [0, 1, 2] and trainer.step == 3, "each batch is made once"
    assert [row["train/answer_tokens"] for row in rows] == [3, 4, 5]
    assert [row["train/tokens"] for row in rows] == [7, 8, 9]
    assert [row["train/epoch"] for row in rows] == pytest.approx([0.4, 0.8, 1.2])
    assert set(trainer.clock.seconds) == {"data", "update_actor"}


def test_an_update_waits_for_the_checkpoint_of_the_step_before(run):
    order: list[str] = []
    roles = SimpleNamespace(update_policy=lambda *_, **__: order.append("update") or SimpleNamespace(metrics={}))
    model = SimpleNamespace(update=lambda *_, **__: order.append("update") or {})
    for kind, parts in ((SupervisedTrainer, {"roles": roles}), (RewardModelTrainer, {"model": model})):
        trainer = make(kind, run, **parts)
        trainer.writer.wait = lambda: order.append("saved")
        trainer._train_and_measure()
    assert order == ["saved", "update"] * 2


def test_a_step_of_a_reward_model_counts_both_answers_and_its_evaluation_sets_the_scale(run):
    steps: list[Any] = []
    scores = torch.tensor([1.0, 2.0, 6.0])
    model = SimpleNamespace(
        update=lambda pairs, *, step: steps.append((len(pairs), step)) or {"train/loss": Metric.mean(0.5)},
        evaluate=lambda pairs: ({"val/accuracy": Metric.mean(len(pairs))}, scores),
        model=SimpleNamespace(config=SimpleNamespace()),
    )
    trainer = make(RewardModelTrainer, run, model=model, held_out=[1, 2])
    values = {k: m.result() for k, m in trainer._train_and_measure().items()}
    assert values == {"train/loss": 0.5, "train/tokens": 7, "train/epoch": 0.4} and steps == [(2, 0)]
    assert trainer._evaluate()["val/accuracy"].result() == 2.0
    facts = model.model.config
    assert facts.reward_mean == 3.0 and facts.reward_std == pytest.approx(7**0.5)
    trainer.parts.held_out = []
    assert trainer._evaluate() == {}


def test_a_supervised_step_is_evaluated_when_its_row_has_the_held_out_loss(run):
    run.append_metrics(1, {"val/loss": 1.0})
    run.append_metrics(2, {"train/loss": 1.0})
    assert [make(SupervisedTrainer, run, step)._is_evaluated() for step in (0, 1, 2)] == [False, True, False]


def test_the_held_out_loss_and_the_answers_are_merged_and_the_engine_rests(run, monkeypatch):
    events: list[Any] = []
    evaluation = SimpleNamespace(metrics={"val-core/a/acc/mean@1": Metric.mean(0.5)})
    parts = {
        "held_out": [1],
        "roles": SimpleNamespace(policy="policy"),
        "publish": lambda version: events.append(("published", version)),
        "evaluator": SimpleNamespace(run=lambda step: events.append(("evaluated", step)) or evaluation),
        "engine": SimpleNamespace(rest=lambda: events.append("rest")),
    }
    trainer = make(SupervisedTrainer, run, 2, **parts)
    trainer.config = SimpleNamespace(data=SimpleNamespace(train_batch_size=4))
    trainer.recorder = SimpleNamespace(evaluation=lambda step, found: events.append(("recorded", step)))
    trainer.callbacks = SimpleNamespace(on_evaluate=lambda t, step, found: events.append(("seen", step)))
    loss = {"val/loss": Metric.mean(2.0)}
    monkeypatch.setattr("gspo.loop.supervised.held_out_loss", lambda *args: events.append(args) or dict(loss))
    assert trainer._evaluate() == loss | evaluation.metrics
    assert events == [("policy", [1], 4), ("published", 2), ("evaluated", 2), "rest", ("recorded", 2), ("seen", 2)]
    trainer.parts.evaluator = None
    assert trainer._evaluate() == loss and len(events) == 7
    trainer.parts.held_out = []
    assert trainer._evaluate() == {}


def test_a_folder_with_content_is_not_written_over(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(DataError, match="exists and is not an empty folder"):
            SupervisedTrainer({}, out=out)  # pyright: ignore
