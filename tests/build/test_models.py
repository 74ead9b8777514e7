"""Which models a run has, from which folders they are loaded, and what their optimisers and schedules are made of."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gspo.build import models
from gspo.build.models import build_roles, check_teacher, optimizer_of, schedule_of
from gspo.build.parts import RunParts
from gspo.config import TrainerConfig
from gspo.config.loading import tree
from gspo.config.schema.model import OptimConfig
from gspo.models import ModelError

MODEL, REF, CRITIC = "actor_rollout_ref.model", "actor_rollout_ref.ref.path", "critic.model.path"
LORA, FOUR = {f"{MODEL}.lora_rank": 4}, {f"{MODEL}.load_in_4bit": True}
KL_LOSS, KL_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"
CPU = torch.device("cpu")


def config(values: dict[str, Any]) -> TrainerConfig:
    found = TrainerConfig()
    for key, value in {f"{MODEL}.path": "base", **values}.items():
        tree.put(found, key, value)
    return found


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is loaded from where, in order: every part of a role that needs real weights is left out."""
    seen: list[str] = []

    def load(c: Any, device: Any, path: str, *, on_host: bool = False, four_bit: bool = False) -> nn.Linear:
        seen.append(path + " on host" * on_host + " in 4 bits" * four_bit)
        return nn.Linear(1, 1)

    def reward_model(path: str, **options: Any) -> nn.Linear:
        seen.append(f"reward model {path} on {options['device']}")
        return nn.Linear(1, 1)

    def made(name: str) -> Any:
        return lambda *arguments, **options: SimpleNamespace(kind=name, arguments=arguments, settings=None)

    monkeypatch.setattr(models, "load_weights", load)
    monkeypatch.setattr(models, "load_reward_model", reward_model)
    monkeypatch.setattr(models, "ValueModel", type("V", (nn.Identity,), {"of_classifier": staticmethod(lambda m: m)}))
    for name in ("Policy", "Critic", "Reference", "TokenScorer", "RewardModel", "MasterOptimizer"):
        monkeypatch.setattr(models, name, made(name))
    adapters = SimpleNamespace(kind="Adapters", disabled="disabled adapters")
    monkeypatch.setattr(models, "Adapters", lambda *arguments, **options: adapters)
    monkeypatch.setattr(models, "forget_quantizer", lambda model: seen.append("quantizer forgotten"))
    monkeypatch.setattr(models, "reference_settings", lambda *arguments: None)
    others = {"critic": None, "reference": None, "reward_model": None}
    monkeypatch.setattr(models, "LocalRoles", lambda p, a: SimpleNamespace(policy=p, adapters=a, **others))
    return seen


SAVED = Path("saved")


@pytest.mark.parametrize(
    ("values", "weights_from", "expected", "roles"),
    [
        ({}, None, ["base"], ""),
        ({}, SAVED, ["saved"], ""),
        (LORA, SAVED, ["base"], "adapters"),  # the frozen weights come from the config's path
        ({**LORA, **FOUR}, None, ["base in 4 bits", "quantizer forgotten"], "adapters"),
        ({"algorithm.adv_estimator": "gae"}, SAVED, ["saved", "base"], "critic"),
        ({"algorithm.adv_estimator": "gae", CRITIC: "value"}, SAVED, ["saved", "value"], "critic"),
        ({"algorithm.adv_estimator": "gae", "critic.enable": False}, None, ["base"], ""),
        ({"algorithm.adv_estimator": "grpo", "critic.enable": True}, None, ["base", "base"], "critic"),
        ({KL_LOSS: True}, SAVED, ["saved", "base"], "reference"),
        ({KL_REWARD: True}, SAVED, ["saved", "base"], "reference"),
        ({KL_LOSS: True, REF: "other"}, SAVED, ["saved", "other"], "reference"),
        ({KL_LOSS: True, **LORA}, None, ["base"], "adapters reference"),  # the policy without its adapters
        ({KL_LOSS: True, REF: "other", **LORA}, None, ["base", "other"], "adapters reference"),
        ({KL_LOSS: True, REF: "other", **LORA, **FOUR}, None, ["base in 4 bits", "quantizer forgotten", "other in 4 bits"], "adapters reference"),
        ({"algorithm.distill_weight": 0.5, REF: "teacher"}, None, ["base", "teacher"], "reference"),
        ({"algorithm.adv_estimator": "opd", REF: "teacher"}, None, ["base", "teacher"], "reference"),
        ({REF: "other"}, None, ["base"], ""),
        ({"reward_model.enable": True, "reward_model.path": "rm"}, None, ["base", "reward model rm on cpu"], "reward_model"),
        ({"reward_model.path": "rm"}, None, ["base"], ""),
        ({"reward.functions": [{"model": "mine"}], "reward_model.path": "rm"}, None, ["base", "reward model mine on cpu"], "reward_model"),
    ],
)  # fmt: skip
def test_which_roles_a_run_has_and_where_their_weights_come_from(loaded, values, weights_from, expected, roles) -> None:
    found = build_roles(config(values), CPU, 9, weights_from)
    assert loaded == expected
    names = ("adapters", "critic", "reference", "reward_model")
    assert " ".join(name for name in names if getattr(found, name) is not None) == roles
    if expected == ["base"] and "reference" in roles:
        assert found.reference.arguments == (found.policy, "disabled adapters")


def test_ranks_load_their_models_into_host_memory(loaded) -> None:
    ranks = SimpleNamespace(run=lambda make: make(), rest=lambda: None)
    every = {"algorithm.adv_estimator": "gae", KL_LOSS: True, "reward_model.enable": True, "reward_model.path": "rm"}
    build_roles(config(every), CPU, 9, None, lambda model, sharding: ranks)
    assert loaded == ["base on host", "base on host", "base on host", "reward model rm on cpu"]


@pytest.mark.parametrize(
    ("values", "total", "warmup", "span"),
    [
        ({}, 40, 0, 40),
        ({"lr_warmup_steps_ratio": 0.125}, 40, 5, 40),
        ({"lr_warmup_steps_ratio": 0.99}, 2, 1, 2),  # a part of a step is none
        ({"lr_warmup_steps_ratio": 0.5, "lr_warmup_steps": 0}, 40, 0, 40),
        ({"lr_warmup_steps_ratio": 0.5, "lr_warmup_steps": 3}, 40, 3, 40),
        ({"lr_warmup_steps_ratio": 0.5, "lr_warmup_steps": -1}, 40, 20, 40),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": 80}, 40, 20, 80),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": 0}, 40, 10, 40),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": -1}, 40, 10, 40),
    ],
)
def test_the_warm_up_and_the_span_of_a_schedule(values, total, warmup, span) -> None:
    optim = OptimConfig(lr=0.5, lr_scheduler_type="cosine", min_lr_ratio=0.1, **values)
    schedule = schedule_of(optim, total)
    for step in (0, 1, warmup // 2, warmup, (warmup + span) // 2, span - 1, span, span + 5):
        if step < warmup:
            expected = 0.5 * (step + 1) / warmup
        else:
            part = min(1.0, (step - warmup) / max(1, span - warmup))
            expected = 0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)
        assert schedule.at(step) == pytest.approx(expected), step


def test_an_optimiser_has_every_value_of_its_section(monkeypatch) -> None:
    seen: list[dict[str, Any]] = []
    for name in ("MasterOptimizer", "EightBitOptimizer", "OffloadedOptimizer"):
        monkeypatch.setattr(
            models, name, lambda weights, name=name, **o: seen.append({"kind": name, **o, "of": dict(weights)})
        )
    model = nn.Linear(2, 1)
    optim = OptimConfig(lr=0.5, betas=[0.7, 0.8], eps=0.25, weight_decay=0.125, fused=False)
    for eight, offload in ((False, False), (False, True), (True, False)):
        optim.eight_bit = eight
        optimizer_of(model, optim, 3.0, offload)
    values = {"lr": 0.5, "betas": (0.7, 0.8), "eps": 0.25, "weight_decay": 0.125, "grad_clip": 3.0, "fused": False}
    kinds = ["MasterOptimizer", "MasterOptimizer", "EightBitOptimizer"]  # nothing is offloaded to where it is
    assert [o.pop("kind") for o in seen] == kinds
    assert all(o.pop("of").keys() == {"weight", "bias"} for o in seen) and seen == [values] * 3


@pytest.mark.parametrize(
    ("values", "teacher", "said"),
    [
        ({REF: "t", "algorithm.distill_weight": 0.5}, {"a": 0, "b": 1}, None),
        ({REF: "t", "algorithm.distill_weight": 0.5}, {"a": 0, "b": 2}, "'b' is number 2 there and 1 here (2 and 2 tokens)"),
        ({REF: "t", "algorithm.adv_estimator": "opd"}, {"a": 0, "b": 1, "c": 2}, "'c' is number 2 there and None here (3 and 2 tokens)"),
        ({REF: "t", "algorithm.adv_estimator": "opd"}, {"b": 1}, "'a' is number None there and 0 here (1 and 2 tokens)"),
        ({REF: "t", KL_LOSS: True}, {"b": 0}, None),  # a reference that teaches nothing
        ({"algorithm.distill_weight": 0.5}, {"b": 0}, None),
    ],
)  # fmt: skip
def test_a_teacher_has_the_tokens_of_the_policy(monkeypatch, values, teacher, said) -> None:
    monkeypatch.setattr(models, "load_tokenizer", lambda path, **o: SimpleNamespace(get_vocab=lambda: teacher))
    own = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    if said is None:
        check_teacher(config(values), own)
        return
    with pytest.raises(ModelError) as caught:
        check_teacher(config(values), own)
    assert said in str(caught.value) and "actor_rollout_ref.ref.path=t" in str(caught.value)


def make_parts(calls: list[str], **changes: Any) -> RunParts:
    def part(name: str, **more: Any) -> Any:
        def load(state: Any) -> None:
            calls.append(f"{name} has {state}")

        made = {"close": lambda: calls.append(f"close {name}"), "state_dict": lambda: f"state of {name}"}
        return SimpleNamespace(**made, load_state_dict=load, **more)

    facts: dict[str, Any] = {"config": config({}), "tokenizer": None, "total_steps": 1, "fingerprint": {}}
    facts |= {name: part(name) for name in ("roles", "engine", "sampler", "objective")}
    facts |= {"evaluator": None, "scorers": [part("one"), part("two")], **{k: part(k) for k in changes}}
    return RunParts(**facts)


def test_parts_are_closed_in_order_and_have_their_states_by_name() -> None:
    calls: list[str] = []
    make_parts(calls, judge=True).close()
    assert calls == [f"close {name}" for name in ("engine", "sampler", "two", "one", "judge", "roles")]
    plain, both = make_parts([]), make_parts([], mixed=True, kl_reward=True)
    assert plain.state_dict() == {"sampler": "state of sampler", "objective": "state of objective"}
    state = {**plain.state_dict(), "rewards": "state of mixed", "kl_reward": "state of kl_reward"}
    assert both.state_dict() == state
    calls.clear()
    make_parts(calls, mixed=True, kl_reward=True).load_state_dict(state)
    names = ("objective", "mixed", "kl_reward", "sampler")
    assert calls == [f"{name} has state of {name}" for name in names]
    calls.clear()
    make_parts(calls, mixed=True, kl_reward=True).load_state_dict(plain.state_dict())  # of a branch that adds them
    assert calls == ["objective has state of objective", "mixed has {}", "sampler has state of sampler"]
