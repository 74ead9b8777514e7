"""Every key of a section reaches the setting that it names: configs with no default left, against whole settings."""

from __future__ import annotations

import pytest
import torch

from gspo.algo.controllers import ClipController
from gspo.algo.objective import BoundRegulariser
from gspo.algo.settings import Behaviour, LossSettings
from gspo.build import models, rewards, run
from gspo.build.data import rows
from gspo.build.models import build_roles
from gspo.build.role_settings import critic_settings, order_seed, policy_settings, reference_settings
from gspo.build.settings import (
    build_objective,
    groups_held,
    sampling_settings,
    total_steps,
    training_params,
    validation_params,
)
from gspo.config import TrainerConfig, load
from gspo.data.columns import Columns
from gspo.data.rows import DataError
from gspo.distributed.run_layout import num_rollout_workers, rollout_dtype, runs_ahead
from gspo.rewards.compose import Overlong, RewardScale
from gspo.rollout.engine import SamplingParams
from gspo.sampling.settings import SamplingSettings
from gspo.seeding import derive_seed
from gspo.training.critic import CriticSettings
from gspo.training.policy import PolicySettings
from gspo.training.schedule import Schedule
from tests.support.small_run import config as small_config
from tests.support.small_run import make_model

ACTOR, ROLLOUT, FILTER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.filter_groups"
PRESENT = ("data.train_files=arithmetic", "actor_rollout_ref.model.path=some/model")


def config(*overrides: str) -> TrainerConfig:
    return load(None, [*PRESENT, *overrides]).config


DRAWN = (
    "data.max_response_length=33",
    f"{ROLLOUT}.temperature=0.7",
    f"{ROLLOUT}.top_k=11",
    f"{ROLLOUT}.top_p=0.8",
    f"{ROLLOUT}.val_kwargs.temperature=0.6",
    f"{ROLLOUT}.val_kwargs.top_k=12",
    f"{ROLLOUT}.val_kwargs.top_p=0.9",
)


def test_how_tokens_are_drawn():
    sampled = config(*DRAWN, f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.ignore_eos=true")
    assert training_params(sampled) == SamplingParams(33, 0.7, 11, 0.8, ignore_eos=True)
    assert validation_params(sampled) == SamplingParams(33, 0.6, 12, 0.9)
    greedy = config(*DRAWN)
    assert validation_params(greedy).temperature == 0.0
    assert training_params(greedy) == SamplingParams(33, 0.7, 11, 0.8)


FILTERED = (
    "data.train_batch_size=6",
    "data.gen_batch_size=9",
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ROLLOUT}.n=5",
    f"{FILTER}.enable=true",
    f"{FILTER}.metric=acc",
    f"{FILTER}.min_spread=0.3",
    f"{FILTER}.max_num_gen_batches=7",
    f"{FILTER}.on_limit=train_partial",
    f"{FILTER}.max_staleness=3",
    f"{FILTER}.max_in_flight=8",
    f"{FILTER}.predict=skip",
    f"{FILTER}.predict_weight=true",
    f"{FILTER}.predict_min_prob=0.2",
    f"{FILTER}.predict_discount=0.5",
    "reward.max_failure_rate=0.4",
)


@pytest.mark.parametrize("strategy", ["stream", "rounds"])
def test_how_groups_are_drawn_and_filtered(strategy):
    got = sampling_settings(config(*FILTERED, *DRAWN, f"{FILTER}.strategy={strategy}"))
    assert got == SamplingSettings(
        train_batch_size=6,
        n=5,
        params=SamplingParams(33, 0.7, 11, 0.8),
        gen_batch_size=9,
        enable=True,
        metric="acc",
        min_spread=0.3,
        strategy=strategy,
        max_num_gen_batches=7,
        on_limit="train_partial",
        max_staleness=3,
        max_in_flight=8,
        predict="skip",
        predict_weight=True,
        predict_min_prob=0.2,
        predict_discount=0.5,
        max_failure_rate=0.4,
    )


def test_staleness_is_that_of_the_mode():
    filtered = (f"{FILTER}.enable=true", f"{FILTER}.max_staleness=3")
    ahead = (f"{ROLLOUT}.mode=async", f"{ROLLOUT}.max_head_offpolicyness=5", f"{ACTOR}.use_decoupled_loss=true")
    assert sampling_settings(config(*filtered)).max_staleness == 3
    assert sampling_settings(config()).max_staleness == 0  # nothing is filtered, so nothing is carried over
    assert sampling_settings(config(*filtered, *ahead)).max_staleness == 5
    workers = (f"{ROLLOUT}.num_workers=3", f"{ROLLOUT}.max_num_seqs=40", f"{ROLLOUT}.n=8")
    assert sampling_settings(config(*ahead, *workers)).max_in_flight == 15
    assert sampling_settings(config(*ahead, *workers, f"{ROLLOUT}.max_concurrent_rollouts=4")).max_in_flight == 4
    assert groups_held(config(*ahead, f"{ROLLOUT}.max_num_seqs=2", f"{ROLLOUT}.n=8"), 1) == 1


def test_length_of_a_run():
    sized = ("data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=5", "trainer.total_epochs=3")
    assert total_steps(config(*sized), 39) == 9  # whole batches of an epoch
    assert total_steps(config(*sized, "trainer.total_training_steps=4"), 39) == 4
    with pytest.raises(DataError, match="more than the 9 training prompts"):
        total_steps(config(*sized), 9)


LOSS = (
    f"{ACTOR}.policy_loss.loss_mode=vanilla",
    f"{ACTOR}.clip_ratio_low=0.11",
    f"{ACTOR}.clip_ratio_high=0.22",
    f"{ACTOR}.clip_ratio_c=5",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    f"{ACTOR}.policy_loss.tau_pos=1.5",
    f"{ACTOR}.policy_loss.tau_neg=2.5",
    f"{ACTOR}.policy_loss.clip_cov_ratio=0.01",
    f"{ACTOR}.policy_loss.clip_cov_lb=0.6",
    f"{ACTOR}.policy_loss.clip_cov_ub=6",
    f"{ACTOR}.policy_loss.kl_cov_ratio=0.02",
    f"{ACTOR}.policy_loss.ppo_kl_coef=0.7",
    f"{ACTOR}.use_decoupled_loss=true",
    f"{ACTOR}.behav_imp_weight_cap=4",
    f"{ACTOR}.behav_imp_weight_mode=sequence_mask",
    f"{ACTOR}.clip_target=0.3",
    f"{ACTOR}.clip_target_bounds=[0.5,3]",
    f"{ACTOR}.kl_loss_coef=0.02",
    f"{ACTOR}.kl_loss_type=k2",
    f"{ACTOR}.entropy_coeff=0.03",
)


def test_the_objective_has_every_setting_of_the_loss():
    got = build_objective(config(*LOSS, f"{ACTOR}.loss_scale_factor=77", f"{ACTOR}.use_kl_loss=true"))
    assert got.loss_mode == "vanilla"
    assert got.settings == LossSettings(
        clip_low=0.11,
        clip_high=0.22,
        clip_c=5,
        aggregation="seq-mean-token-sum-norm",
        norm_length=77,
        level="token",
        tau_pos=1.5,
        tau_neg=2.5,
        clip_cov_ratio=0.01,
        clip_cov_bounds=(0.6, 6),
        kl_cov_ratio=0.02,
        kl_cov_coef=0.7,
        behaviour=Behaviour("sequence_mask", 4),
    )
    assert got.clip_control == ClipController(0.3, (0.5, 3))
    terms = {"kl_coef": 0.02, "kl_kind": "k2", "entropy_coeff": 0.03}
    assert got.regulariser == BoundRegulariser("seq-mean-token-sum-norm", 77, **terms)
    off = build_objective(config(*LOSS, "data.max_response_length=55"))
    assert off.regulariser == BoundRegulariser("seq-mean-token-sum-norm", 55, **{**terms, "kl_coef": 0.0})


def test_one_clip_ratio_is_both_sides():
    got = build_objective(config(f"{ACTOR}.clip_ratio=0.001"))
    assert (got.settings.clip_low, got.settings.clip_high, got.settings.behaviour) == (0.001, 0.001, None)
    assert got.clip_control.target is None


def test_the_level_of_the_ratio_decides_the_loss():
    for level, loss in (("token", "vanilla"), ("sequence", "gspo")):
        got = build_objective(config(f"{ACTOR}.importance_sampling_level={level}"))
        assert (got.settings.level, got.loss_mode) == (level, loss)
    both = (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.importance_sampling_level=sequence")
    assert [build_objective(config(*words)).settings.level for words in (both[:1], both)] == ["token", "sequence"]


def test_the_estimator_has_its_constants():
    got = build_objective(config("algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.5"))
    rewards, mask, groups = torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 3), torch.zeros(1, dtype=torch.long)
    _, returns = got.advantage(rewards, mask, groups, values=torch.tensor([[0.1, 0.2, 0.3]]))
    # δ = (0.08, 0.07, 0.7); A = δ_t + 0.45·A_next; returns are A + V.
    assert returns[0].tolist() == pytest.approx([0.08 + 0.45 * (0.07 + 0.45 * 0.7) + 0.1, 0.07 + 0.45 * 0.7 + 0.2, 1.0])
    plain = build_objective(config("algorithm.norm_adv_by_std_in_grpo=false"))
    scores = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    advantages, _ = plain.advantage(scores, torch.ones(4, 1), torch.zeros(4, dtype=torch.long))
    assert advantages[:, 0].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


SPLIT = (
    "data.train_batch_size=12",
    f"{ACTOR}.ppo_mini_batch_size=6",
    f"{ACTOR}.ppo_epochs=3",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4000",
    f"{ACTOR}.old_log_prob_source=recompute",
    f"{ACTOR}.entropy_coeff=0.01",
    f"{ACTOR}.entropy_checkpointing=true",
    "actor_rollout_ref.model.use_shared_prefix=false",
    "actor_rollout_ref.model.attn_implementation=flex_attention",
    f"{ROLLOUT}.temperature=0.7",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=3000",
)


def test_how_the_policy_divides_a_batch():
    assert policy_settings(config(*SPLIT)) == PolicySettings(
        temperature=0.7,
        mini_batch_groups=6,
        num_epochs=3,
        micro_batch_tokens=4000,
        micro_batch_rows=1,
        old_log_prob_source="recompute",
        entropy_in_loss=True,
        entropy_checkpointing=True,
        layout="packed",
        flex_attention=True,
        score_tokens=3000,
        score_rows=None,
    )
    by_rows = policy_settings(
        config(f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2")
    )
    assert (by_rows.micro_batch_tokens, by_rows.micro_batch_rows) == (None, 5)
    assert (by_rows.score_tokens, by_rows.score_rows) == (None, 2)
    assert (by_rows.layout, by_rows.entropy_in_loss, by_rows.flex_attention) == ("shared", False, False)
    plain = config(
        "actor_rollout_ref.model.use_shared_prefix=false", "actor_rollout_ref.model.use_remove_padding=false"
    )
    assert policy_settings(plain).layout == "plain"


def test_a_token_budget_that_is_asked_for_wins_over_rows():
    both = config(f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", f"{ACTOR}.use_dynamic_bsz=true", *SPLIT)
    assert policy_settings(both).micro_batch_tokens == 4000


def test_how_the_critic_divides_a_batch():
    own = (
        "algorithm.adv_estimator=gae",
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_epochs=2",
        "critic.ppo_max_token_len_per_gpu=900",
        "critic.cliprange_value=0.25",
    )
    assert critic_settings(config(*SPLIT, *own)) == CriticSettings(4, 2, 900, 1, 0.25, "packed")
    as_actor = critic_settings(config(*SPLIT, "algorithm.adv_estimator=gae"))
    assert as_actor == CriticSettings(6, 3, 4000, 1, 0.5, "packed")
    rows = critic_settings(config(*SPLIT, *own, "critic.ppo_micro_batch_size_per_gpu=7"))
    assert (rows.micro_batch_tokens, rows.micro_batch_rows) == (None, 7)


def test_how_the_reference_divides_a_batch():
    kl, ref = f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref"
    of = policy_settings(config(*SPLIT, kl))

    def cut(*overrides: str) -> tuple[int | None, int]:
        got = reference_settings(config(*SPLIT, kl, *overrides), of)
        return got.micro_batch_tokens, got.micro_batch_rows

    assert cut() == (4000, 1)
    assert cut(f"{ref}.log_prob_micro_batch_size_per_gpu=3") == (None, 3)
    assert cut(f"{ref}.log_prob_max_token_len_per_gpu=700") == (700, 1)


def test_the_order_of_mini_batches_follows_the_seed_and_the_step():
    shuffled = config(f"{ACTOR}.shuffle=true", "trainer.seed=5")
    assert order_seed(shuffled, 3) == derive_seed(5, "mini_batches", 3)
    assert order_seed(config(f"{ACTOR}.shuffle=false"), 3) is None


@pytest.mark.parametrize("section", [ACTOR, "critic"])
def test_schedules_of_an_optimiser_section(section):
    def schedule(*overrides: str) -> Schedule:
        c = config("algorithm.adv_estimator=gae", *(f"{section}.optim.{word}" for word in overrides))
        return models.schedule_of((c.critic if section == "critic" else c.actor_rollout_ref.actor).optim, 40)

    assert schedule("lr=3e-5") == Schedule(3e-5, "constant", 0, 40, 0.0)
    cosine = ("lr=3e-5", "lr_scheduler_type=cosine", "min_lr_ratio=0.2")
    assert schedule(*cosine, "lr_warmup_steps_ratio=0.1") == Schedule(3e-5, "cosine", 4, 40, 0.2)
    assert schedule(*cosine, "lr_warmup_steps=7", "total_training_steps=60") == Schedule(3e-5, "cosine", 7, 60, 0.2)
    assert schedule(*cosine, "lr_warmup_steps_ratio=0.1", "total_training_steps=60").warmup_steps == 6


def optim(section: str, lr: float, decay: float) -> list[str]:
    words = {"lr": lr, "weight_decay": decay, "betas": "[0.5,0.6]", "eps": 1e-4, "fused": "false"}
    return [f"{section}.optim.{name}={value}" for name, value in words.items()]


def test_each_role_has_the_optimiser_of_its_own_section(tmp_path, model):
    other = make_model(tmp_path / "other", seed=4)
    c = small_config(
        tmp_path,
        model,
        *optim(ACTOR, 2e-3, 0.2),
        *optim("critic", 3e-3, 0.3),
        f"{ACTOR}.grad_clip=0.4",
        "critic.grad_clip=0.6",
        "algorithm.adv_estimator=gae",
        f"{ACTOR}.use_kl_loss=true",
        f"actor_rollout_ref.ref.path={other}",
        "critic.cliprange_value=0.7",
    ).config
    roles = build_roles(c, torch.device("cpu"), total_steps=10)
    for role, lr, decay, clip in ((roles.policy, 2e-3, 0.2, 0.4), (roles.critic, 3e-3, 0.3, 0.6)):
        found = role.optimizer.adamw.defaults
        wanted = {"lr": lr, "weight_decay": decay, "betas": (0.5, 0.6), "eps": 1e-4, "fused": False}
        assert {name: found[name] for name in wanted} == wanted
        assert role.optimizer.grad_clip == clip and role.schedule.lr == lr
    assert roles.critic.settings.clip == 0.7
    assert roles.policy.settings.temperature == 1.0 and roles.policy.settings.mini_batch_groups == 2
    policy, reference = roles.policy.model.state_dict(), roles.reference.scorer.model.state_dict()
    assert any(not torch.equal(policy[name], reference[name]) for name in policy)
    assert not any(p.requires_grad for p in roles.reference.scorer.model.parameters())


SCORED = (
    "reward.num_workers=3",
    "reward.timeout=4",
    "reward.memory=500",
    "reward.retries=2",
    "reward.format_weight=0.5",
    "reward.repetition_penalty=0.25",
    "reward.sandbox_level=3",
    "reward.allow_unsandboxed_code=true",
    "reward.scale=2",
    "reward.bias=0.5",
    "reward.clip=3",
    "reward_model.reward_manager=dapo",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len=5",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
    "reward_model.reward_kwargs.overlong_buffer_cfg.log=true",
)


@pytest.mark.parametrize(("words", "limit"), [((), 40), (("reward_model.reward_kwargs.max_resp_len=30",), 30)])
def test_the_scorer_gets_every_key_of_its_sections(monkeypatch, words, limit):
    seen = {}
    monkeypatch.setattr(rewards, "make_scorer", lambda reward, **options: seen.update(reward=reward, **options))
    rewards.build_scorer(config(*SCORED, *words, "data.max_response_length=40"))
    assert seen == {
        "reward": None,
        "manager": "dapo",
        "num_workers": 3,
        "timeout": 4,
        "memory": 500,
        "retries": 2,
        "overlong": Overlong(limit, 5, 0.5, True),
        "format_weight": 0.5,
        "repetition_penalty": 0.25,
        "sandbox_level": 3,
        "allow_unsandboxed_code": True,
        "scale": RewardScale(2.0, 0.5, 3.0),
    }


def test_rows_of_a_split_are_limited_and_seeded_by_its_keys(monkeypatch):
    calls = []

    def load_rows(name, split, **options):
        calls.append((name, split, options["limit"], options["seed"], options["hub_split"], options["system_prompt"]))
        return list(range(20))

    monkeypatch.setattr(rows, "load_rows", load_rows)
    c = config(
        "trainer.seed=9",
        "data.num_train_samples=12",
        "data.num_val_samples=6",
        "data.train_batch_size=4",
        f"{ACTOR}.ppo_mini_batch_size=2",
        "data.train_split=first",
        "data.val_split=second",
        "data.system_prompt=Think.",
    )
    assert len(rows.rows_of_split(c, None, "train", Columns())) == 12
    assert len(rows.rows_of_split(c, None, "val", Columns())) == 6
    # Held-out questions are the same for every seed.
    assert calls == [("arithmetic", "train", 12, 9, "first", "Think."), ("arithmetic", "val", 6, 0, "second", "Think.")]


def test_the_evaluator_and_the_order_of_prompts_follow_their_keys(tmp_path, model):
    c = small_config(
        tmp_path,
        model,
        "trainer.seed=3",
        "data.seed=8",
        "data.shuffle=false",
        "data.val_batch_size=5",
        f"{ROLLOUT}.val_kwargs.n=2",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.05",
        "algorithm.kl_ctrl.target_kl=0.01",
        "algorithm.kl_ctrl.horizon=50",
    ).config
    parts = run.build(c)
    try:
        evaluator = parts.evaluator
        assert (evaluator.n, evaluator.batch_size, evaluator.seed) == (2, 5, derive_seed(3, "eval"))
        assert len(evaluator.prompts) == 16 and evaluator.params == validation_params(c)
        source = parts.sampler.state_dict()["prompts"]["source"]
        assert (source["seed"], source["shuffle"], source["epoch_size"]) == (8, False, 64)
        controller = parts.kl_reward.controller
        assert (controller.value, controller.target, controller.horizon) == (0.05, 0.01, 50)
    finally:
        parts.close()


def test_where_rollouts_run_and_whether_they_run_ahead():
    device = torch.device("cpu")
    ahead = (f"{ROLLOUT}.mode=async", f"{ROLLOUT}.num_workers=1", f"{ACTOR}.use_decoupled_loss=true")
    cases = {
        (): (0, False),
        (f"{ROLLOUT}.num_workers=1",): (0, False),  # the trainer's own process generates
        (f"{ROLLOUT}.num_workers=2",): (2, False),
        (f"{ROLLOUT}.num_workers=3",): (3, False),
        (*ahead, f"{ROLLOUT}.max_head_offpolicyness=2"): (1, True),
        (*ahead, f"{ROLLOUT}.max_head_offpolicyness=0"): (1, False),
    }
    for words, wanted in cases.items():
        c = config(*words)
        assert (num_rollout_workers(c), runs_ahead(c)) == wanted, words
    model, rollout = "actor_rollout_ref.model.dtype=bfloat16", f"{ROLLOUT}.dtype=float16"
    assert rollout_dtype(config(model), device) == "bfloat16"
    assert rollout_dtype(config(model, rollout), device) == "float16"
