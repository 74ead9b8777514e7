"""The stages of a training step: which run, in which order, and what each is given; with parts that note their calls."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.config import TrainerConfig
from gspo.data.examples import Example
from gspo.loop.counters import Counters
from gspo.loop.step_records import measure
from gspo.loop.trainer import Trainer
from gspo.metrics import Metric
from gspo.runs.clock import Clock
from gspo.sampling.step_counts import SamplingCounts
from gspo.seeding import derive_seed
from gspo.training.policy import Update
from gspo.types import Prompt
from tests.loop.test_step_records import two_groups

ALL = ("reference", "critic", "baseline", "examples")


class Stages:
    """The parts of a run. `log` has every call in order, with what a test looks at."""

    def __init__(self, config: TrainerConfig, *used: str, distills: bool = False) -> None:
        self.config, self.log, self.groups = config, [], two_groups()
        self.sampling = SamplingCounts(0, 1, 1, weights=(2.0, 3.0))
        self.sampler = SimpleNamespace(next_batch=self._generate, release=self._note("release"))
        self.engine = SimpleNamespace(rest=self._note("rest"), load_weights=self._note("load"))
        self.objective = SimpleNamespace(
            with_advantages=self._advantages, loss=lambda: "loss", regulariser="regulariser", distills=distills
        )
        self.mixed = self.evaluator = self.kl_reward = None
        self.baseline = SimpleNamespace(score=self._baseline) if "baseline" in used else None
        order = SimpleNamespace(batch=lambda step: [Example(Prompt("e", (), (1,)), (2,) * (step + 1))])
        self.examples = order if "examples" in used else None
        self.roles = SimpleNamespace(
            policy=SimpleNamespace(score=self._old, log_probs=self._log_probs),
            reference=SimpleNamespace(score=self._reference) if "reference" in used else None,
            critic=SimpleNamespace(score=self._values, update=self._critic) if "critic" in used else None,
            update_policy=self._update,
        )

    def _note(self, name: str):
        return lambda *args, **options: self.log.append((name, *args, *options.items()))

    def _generate(self):
        self.log.append("generate")
        return self.groups, self.sampling

    def _old(self, batch):
        self.log.append("score")
        self.collated = batch
        return batch.with_old(batch.mask - 2.0, batch.mask, unscored_rows=[1])

    def _log_probs(self, batch):
        self.log.append("log_probs")
        return batch.mask * 0 - 5.0, batch.mask * 0 + 0.5

    def _reference(self, batch):
        self.log.append("reference")
        return dataclasses.replace(batch, ref_log_probs=batch.mask - 3.0)

    def _values(self, batch):
        self.log.append("values")
        return dataclasses.replace(batch, values=batch.mask + 4.0)

    def _baseline(self, groups, step):
        self.log.append(("baseline", step))
        return "baselines", {"baseline/x": Metric.mean(1.0)}

    def _advantages(self, batch, weights, baselines):
        self.log.append("advantages")
        self.given = batch, weights, baselines
        return batch.with_advantages(batch.mask, batch.mask)

    def _critic(self, batch, *, step):
        self.log.append(("critic", step))
        return {"critic/vf_loss": Metric.mean(2.0)}

    def _update(self, batch, loss, *, step, regulariser, beside):
        self.log.append(("update", loss, step, regulariser))
        self.beside = beside
        return Update({"actor/x": Metric.mean(3.0)}, batch.mask, batch)


def train(parts: Stages, step: int = 4) -> Any:
    """The trained step of a trainer without its start."""
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.parts, trainer.step, trainer.clock = parts.config, parts, step, Clock()
    trainer.writer = SimpleNamespace(wait=lambda: parts.log.append("saved"))
    done = trainer._train()
    assert trainer.step == step
    parts.stages = set(trainer.clock.seconds)
    return done


def settings(**values: Any) -> TrainerConfig:
    config = TrainerConfig()
    config.trainer.seed, config.trainer.critic_warmup = 5, values.get("warmup", 0)
    actor = config.actor_rollout_ref.actor
    actor.use_kl_loss, actor.shuffle, actor.sft_weight = values.get("kl", True), values.get("shuffle", False), 0.25
    config.algorithm.mask_truncated = values.get("mask_truncated", False)
    return config


def test_every_stage_runs_once_in_its_order_with_what_the_others_made():
    parts = Stages(settings(), *ALL)
    done = train(parts)
    groups = parts.groups
    assert parts.log == [
        *("generate", ("rest",), "score", "reference", "values", ("baseline", 4), "advantages"),
        "saved",  # the checkpoint of the step before is on disk before the weights change
        *(("critic", 4), ("update", "loss", 4, "regulariser")),
        ("load", None, ("version", 5)),
        ("release", groups),
    ]
    batch, weights, baselines = parts.given
    assert weights.tolist() == [2.0, 2.0, 3.0] and baselines == "baselines"
    assert torch.equal(batch.ref_log_probs, batch.mask - 3.0) and torch.equal(batch.values, batch.mask + 4.0)
    assert parts.beside.weight == 0.25 and parts.beside.batch.response_ids == [(2,) * 5]
    assert done.groups is groups and done.sampling is parts.sampling and set(done.update.metrics) == {"actor/x"}
    assert {name: m.result() for name, m in done.extra.items()} == {"baseline/x": 1.0, "critic/vf_loss": 2.0}
    stages = {
        "gen",
        "old_log_prob",
        "ref",
        "values",
        "baseline",
        "adv",
        "update_critic",
        "update_actor",
        "update_weights",
    }
    assert parts.stages == stages


def test_a_run_of_one_model_has_no_other_stages():
    parts = Stages(settings())
    train(parts)
    assert [e if isinstance(e, str) else e[0] for e in parts.log] == [
        *("generate", "rest", "score", "advantages", "saved", "update", "load", "release")
    ]
    assert parts.given[2] is None and parts.beside is None


@pytest.mark.parametrize(("kl", "distills", "scores"), [(True, False, 1), (False, True, 1), (False, False, 0)])
def test_the_reference_scores_only_where_its_log_probs_are_used(kl, distills, scores):
    parts = Stages(settings(kl=kl), "reference", distills=distills)
    train(parts)
    assert parts.log.count("reference") == scores


@pytest.mark.parametrize(
    ("step", "warmup", "critic", "trains"), [(2, 3, 1, 0), (3, 3, 1, 1), (2, 3, 0, 1), (0, 0, 1, 1)]
)
def test_the_policy_is_trained_after_the_warm_up_of_the_critic(step, warmup, critic, trains):
    parts = Stages(settings(warmup=warmup), *["critic"][:critic])
    done = train(parts, step)
    assert sum(e[0] == "update" for e in parts.log) == trains
    assert (("critic", step) in parts.log) == bool(critic)
    if not trains:
        batch = done.update.batch
        assert done.update.metrics == {} and bool((done.update.log_probs == -5.0).all())
        assert batch.unscored_rows == () and bool((batch.old_log_probs[1] == -5.0).all())
        assert torch.equal(batch.old_log_probs[0], batch.mask[0] - 2.0)
        assert bool((batch.entropy[1] == 0.5).all())
    assert ("load", None, ("version", step + 1)) in parts.log


def test_mini_batches_are_drawn_by_the_step_and_truncated_answers_are_masked_where_asked():
    for step in (0, 4):
        parts = Stages(settings(shuffle=True))
        train(parts, step)
        assert parts.collated.order_seed == derive_seed(5, "mini_batches", step)
    plain, masked = Stages(settings()), Stages(settings(mask_truncated=True))
    train(plain), train(masked)
    assert plain.collated.order_seed is None
    assert plain.collated.mask.sum(-1).tolist() == [3, 2, 1] and masked.collated.mask.sum(-1).tolist() == [0, 2, 1]


def test_the_metrics_of_a_step_are_those_of_all_parts_and_tokens_add_up():
    parts = Stages(settings())
    done = train(parts)
    seen: list[Any] = []

    def adds(name: str, *expected: Any):
        def observe(*args: Any) -> dict[str, Metric]:
            seen.append((name, *args))
            return {f"{name}/x": Metric.mean(1.0)}

        return observe

    parts.objective.observe, parts.objective.teacher_metrics = adds("objective"), adds("teacher")
    parts.engine.metrics = adds("engine")
    parts.kl_reward, parts.mixed = SimpleNamespace(observe=adds("kl")), SimpleNamespace(observe=adds("mixed"))
    parts.config.actor_rollout_ref.rollout.calculate_log_probs = False
    counters = Counters(generated_tokens=100, wasted_tokens=7)
    metrics = measure(done, parts, counters)
    assert {f"{name}/x" for name in ("objective", "teacher", "engine", "kl", "mixed", "actor")} <= set(metrics)
    assert ("objective", done.update.metrics) in seen and ("teacher", done.update.batch) in seen
    assert not any("rollout_kl" in name for name in metrics)
    total = 100 + metrics["train/generated_tokens"].result()
    assert metrics["train/total_generated_tokens"].result() == counters.generated_tokens == total
    parts.config.actor_rollout_ref.rollout.calculate_log_probs, parts.mixed = True, None
    again = measure(done, parts, counters)
    assert "actor/rollout_kl" in again and "mixed/x" not in again


@pytest.mark.parametrize(("spent", "last"), [(None, 99), ("the budget is spent", 5)])
def test_a_step_is_counted_before_it_is_measured_recorded_and_warned_of(monkeypatch, spent, last):
    """Groups, warnings and metrics belong to the step that trained on them; a spent budget ends the run after it."""
    parts, noted = Stages(settings()), []
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.parts, trainer.step, trainer.clock = parts.config, parts, 4, Clock()
    trainer.total_steps, trainer.counters, trainer.writer = 99, Counters(), SimpleNamespace(wait=lambda: None)
    trainer.console = SimpleNamespace(warn=noted.append, say=noted.append)
    trainer.recorder = SimpleNamespace(groups=lambda step, done, text: noted.append((step, done.groups, text)))
    parts.token_text, parts.mixed = str, SimpleNamespace(over_budget=lambda: spent)
    parts.sampling.num_rollouts, parts.sampling.num_failed_rewards = 8, 1

    def measured(done, of, counters):
        noted.append((trainer.step, done.groups is of.groups, counters is trainer.counters))
        return {"x": Metric.mean(1.0)}

    monkeypatch.setattr("gspo.loop.trainer.measure", measured)
    assert set(trainer._train_and_measure()) == {"x"} and trainer.step == 5 and trainer.total_steps == last
    assert noted[0] == (5, True, True) and noted[1].startswith("step 5: 1 of 8 rewards failed")
    assert noted[2] == (5, parts.groups, str) and noted[3:] == ([] if spent is None else [spent])


def test_progress_is_shown_for_the_step_that_comes_next():
    trainer: Any = object.__new__(Trainer)
    shown: list[Any] = []
    trainer.step, trainer.total_steps, trainer.clock = 4, 9, Clock()
    trainer.console = SimpleNamespace(generating=lambda *values: shown.append(values))
    trainer._watch_sampling(2, 8)
    assert shown == [(5, 9, 2, 8)] and trainer.clock.beats == 1
