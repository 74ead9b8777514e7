"""Keys of the models and what stands beside them: sharding, schedules, adapters, reward model, judge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from gspo.build.models import build_roles
from gspo.build.rewards import add_model, build_scorer, judge_settings, reward_lag, rewards_of
from gspo.config import TrainerConfig, load
from gspo.models.load import load_tokenizer
from gspo.rewards.judge.settings import Criterion, JudgeSettings
from gspo.training.parallel.fsdp import ShardSettings
from gspo.training.parallel.ranks import ALONE
from gspo.training.reward_model import RewardModelSettings
from gspo.training.schedule import Schedule
from gspo.types import Group, Prompt, Rollout
from tests.support.small_run import config as small_config
from tests.support.small_run import make_model

ACTOR, MODEL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref"
CPU = torch.device("cpu")


def config(*overrides: str) -> TrainerConfig:
    return load(None, [f"{MODEL}.path=some/model", *overrides]).config


def sharding(section: str, **values: object) -> list[str]:
    return [f"{section}.fsdp_config.{name}={json.dumps(value)}" for name, value in values.items()]


def test_each_role_is_sharded_by_its_own_section_and_the_critic_has_its_own_model_and_schedule(tmp_path, model):
    other, found = make_model(tmp_path / "other", seed=4), []
    schedule = {"lr": 3e-3, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.5}
    c = small_config(
        tmp_path,
        model,
        "algorithm.adv_estimator=gae",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.strategy=fsdp2",
        *sharding(ACTOR, param_offload=True, fsdp_size=2),
        *sharding(REF, offload_policy=True, reshard_after_forward=False),
        *sharding("critic", optimizer_offload=True, fsdp_size=4),
        f"critic.model.path={other}",
        *(f"critic.optim.{name}={value}" for name, value in schedule.items()),
        "critic.optim.total_training_steps=50",
    ).config

    def place(module, settings):
        found.append(settings)
        return ALONE

    roles = build_roles(c, CPU, total_steps=10, ranks_of=place)
    assert found == [
        ShardSettings(param_offload=True, fsdp_size=2),
        ShardSettings(optimizer_offload=True, fsdp_size=4),
        ShardSettings(offload_policy=True, reshard_after_forward=False),
    ]
    assert roles.critic is not None and roles.critic.schedule == Schedule(3e-3, "cosine", 2, 50, 0.5)
    own, policy = (next(iter(part.parameters())) for part in (roles.critic.model.decoder, roles.policy.model))
    assert own.shape == policy.shape and not torch.equal(own, policy)


def test_a_critic_can_be_asked_for_and_left_out(tmp_path, model):
    for words, has in (((), False), (("critic.enable=true",), True)):
        roles = build_roles(small_config(tmp_path, model, *words).config, CPU, total_steps=10)
        assert (roles.critic is not None) is has


def test_adapters_are_where_the_keys_put_them(tmp_path, model):
    words = ("lora_rank=3", "lora_alpha=6", "target_modules=[q_proj,v_proj,up_proj]", "exclude_modules=[v_proj]")
    roles = build_roles(
        small_config(tmp_path, model, *(f"{MODEL}.{word}" for word in words)).config, CPU, total_steps=10
    )
    trained = {n: p for n, p in roles.policy.model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained} == {"q_proj", "up_proj"}
    assert {min(p.shape) for p in trained.values()} == {3}
    scales = [m.scaling for m in roles.policy.model.modules() if hasattr(m, "lora_A")]
    assert {scale for by_adapter in scales for scale in by_adapter.values()} == {6 / 3}


def test_gradient_checkpointing_recomputes_the_layers(tmp_path, model):
    for words, is_on in (((), False), ((f"{MODEL}.enable_gradient_checkpointing=true",), True)):
        roles = build_roles(small_config(tmp_path, model, *words).config, CPU, total_steps=10)
        assert roles.policy.model.is_gradient_checkpointing is is_on


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("classifier"), load_tokenizer("embedded")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    facts = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5, **shape
    )
    facts.reward_mean, facts.reward_std = 2.0, 4.0
    LlamaForSequenceClassification(facts).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_has_every_key_of_its_section(tmp_path, model, classifier):
    enabled = ("reward_model.enable=true", f"reward_model.path={classifier}")

    def scored(*words: str) -> tuple[float, RewardModelSettings, torch.dtype]:
        c = small_config(tmp_path, model, *enabled, *words).config
        role = build_roles(c, CPU, total_steps=10).reward_model
        scorer = build_scorer(c)
        add_model(c, scorer, role)
        rollout = Rollout((5,), (-1.0,), (1,), (0,), "stop", text="4")
        prompt = Prompt("p", ({"role": "user", "content": "2+2="},), (1,), data_source="arithmetic", ground_truth="4")
        try:
            scorer.submit(Group(prompt, (rollout,), 0, 0))
            (group,) = scorer.collect()
        finally:
            scorer.close()
        assert group.rollouts[0].reward is not None and role is not None
        return group.rollouts[0].reward.score, role.settings, next(role.scorer.parameters()).dtype

    plain, settings, dtype = scored()
    assert (settings, dtype) == (RewardModelSettings(16384, "packed", False), torch.float32)
    half, settings, dtype = scored("reward_model.weight=0.5", "reward_model.max_tokens_per_batch=300")
    assert half == pytest.approx(plain / 2) and settings.max_tokens == 300
    saved, settings, _ = scored("reward_model.normalize=saved", "reward_model.offload=on")
    assert saved == pytest.approx((plain - 2) / 4) and settings.offload
    assert scored("reward_model.dtype=bfloat16")[2] == torch.bfloat16


JUDGE = {
    "base_url": "http://host/v1",
    "model": "wise",
    "api_key_env": "MINE",
    "view": "full_rollout",
    "max_score": 5.0,
    "samples": 3,
    "temperature": 0.5,
    "max_tokens": 99,
    "timeout": 7.0,
    "retries": 2,
    "max_concurrent": 8,
    "requests_per_minute": 30.0,
    "tokens_per_minute": 900.0,
    "max_tokens_spent": 5000,
}


def test_a_judge_has_every_key_of_its_section(tmp_path):
    (tmp_path / "prompt.txt").write_text("Grade {answer}.\n")
    (tmp_path / "rubric.toml").write_text('[[criteria]]\nname = "a"\ntext = "b?"\nchoices = ["no", "yes"]\n')
    words = [f"reward.judge.{name}={value}" for name, value in JUDGE.items()]
    more = (f"reward.judge.prompt={tmp_path}/prompt.txt", "reward.judge.cache=verdicts.sqlite")
    found = judge_settings(config(*words, *more).reward.judge, tmp_path)
    wanted = JudgeSettings(**JUDGE, prompt="Grade {answer}.", cache=str(tmp_path / "verdicts.sqlite"))
    assert found == wanted
    rubric = ("reward.judge.kind=rubric", f"reward.judge.rubric={tmp_path}/rubric.toml")
    found = judge_settings(config(*words, *more, *rubric).reward.judge, tmp_path)
    criteria = (Criterion("a", "b?", 1.0, ("no", "yes")),)
    assert found == dataclasses.replace(wanted, kind="rubric", rubric=criteria)
    others = {"base_url": "http://other/v1", "model": "second", "api_key_env": "THEIRS"}
    held_out = config(*words, *more, *(f"reward.judge.eval.{name}={value}" for name, value in others.items()))
    found = judge_settings(held_out.reward.judge, tmp_path, held_out=True)
    assert found == dataclasses.replace(wanted, **others)
    assert judge_settings(held_out.reward.judge, tmp_path) == wanted
    (judge,) = rewards_of(config(*words, "reward.judge.weight=0.25")).judges
    assert judge.weight == 0.25


def test_rewards_are_collected_after_the_lag_of_the_key():
    assert reward_lag(config("reward.lag=7"), build_scorer(config()), [], on_gpu=True) == 7
