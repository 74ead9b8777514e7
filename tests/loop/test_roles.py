"""Critic, reference, KL, adapters, greedy baseline and staleness in whole runs: what acts, and that all of it resumes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.checkpoint.resume import ResumeRefused
from gspo.models.load import load_model, load_tokenizer
from gspo.runs.group_log import read_groups
from tests.loop.runs import rows, train, trainer
from tests.support.small_run import final_state, make_model

ACTOR, MODEL, FILTER = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.filter_groups"
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=3e-3", "trainer.critic_warmup=1")
KL_REWARD = (
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_ctrl.target_kl=0.01",
    "algorithm.kl_ctrl.horizon=50",
)
STALE = (f"{FILTER}.max_staleness=4", f"{FILTER}.max_in_flight=20")
SETUPS = {
    "ppo with kl in loss and reward": (*PPO, *KL_REWARD, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.01"),
    "adapters with kl in the reward": (f"{MODEL}.lora_rank=1", f"{MODEL}.lora_alpha=4", *KL_REWARD),
    "greedy baseline, decoupled": ("algorithm.adv_estimator=remax", f"{ACTOR}.use_decoupled_loss=true", *STALE),
}
THREE = "trainer.total_training_steps=3"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=SETUPS)
def setup(request, tmp_path_factory, model):
    """A run of three steps without interruption: its name and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, model, THREE, *SETUPS[request.param])
    return request.param, folder


def test_every_role_resumes_to_the_bit_and_its_metrics_are_there(setup, tmp_path, model):
    name, folder = setup
    overrides = (THREE, *SETUPS[name])
    train(tmp_path, model, *overrides, stop_after=1)
    train(tmp_path, model, *overrides)
    assert final_state(tmp_path / "run") == final_state(folder / "run")
    _check_metrics(name, rows(folder))


def _check_metrics(name: str, seen: list[dict]) -> None:
    if name.startswith("ppo"):
        assert "actor/pg_loss" not in seen[0] and "actor/kl_loss" in seen[1]  # the first step only warms the critic up
        for key in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr"):
            assert all(f"critic/{key}" in row for row in seen)
        assert seen[0]["critic/vpred_mean"] != seen[2]["critic/vpred_mean"]
    if "kl in the reward" in name or "loss and reward" in name:
        betas = [row["actor/reward_kl_penalty_coeff"] for row in seen]
        # The first answers are those of the reference itself: to the bit no KL, so β falls by the most it may.
        assert seen[0]["actor/reward_kl_penalty"] == 0
        assert betas[0] == 0.05 and betas[1] < betas[0]
        assert seen[2]["actor/reward_kl_penalty"] != 0
    if "decoupled" in name:
        assert max(row["train/staleness/max"] for row in seen) >= 1
        assert any(row["actor/behav_kl"] != 0 for row in seen)
        assert seen[2]["actor/rollout_ratio_token/max"] > 1.01 > seen[0]["actor/rollout_ratio_token/max"]
        assert seen[0]["critic/greedy_failures"] == 0 and 0 <= seen[0]["critic/greedy_score/mean"] <= 1


def test_the_critic_warms_up_while_the_policy_waits(tmp_path, model):
    t = trainer(tmp_path, model, *PPO)
    before = [p.clone() for p in t.parts.policy.model.parameters()]
    t.train_step()
    assert all(torch.equal(a, b) for a, b in zip(before, t.parts.policy.model.parameters()))
    assert (t.parts.roles.critic.model.head.weight != 0).any()
    t.train_step()
    assert not all(torch.equal(a, b) for a, b in zip(before, t.parts.policy.model.parameters()))
    t.close()


@pytest.mark.parametrize("source", ["first_pass", "recompute", "rollout"])
def test_what_a_step_that_only_warms_up_records_is_scored_in_every_row(tmp_path, model, source):
    train(tmp_path, model, *PPO, f"{ACTOR}.old_log_prob_source={source}", stop_after=1)
    file = tmp_path / "run" / "groups" / "step-000001.jsonl.gz"
    responses = [r for g in read_groups(file) for r in g["responses"] if "new_log_probs" in r]
    assert len(responses) == 16
    for r in responses:
        assert r["old_log_probs"] == (r["log_probs"] if source == "rollout" else r["new_log_probs"])
        assert r["ratio"] == pytest.approx(1.0, abs=0 if source != "rollout" else 1e-4)
    gaps = [m - o for r in responses for m, o in zip(r["log_probs"], r["old_log_probs"])]
    assert min(map(max, ([abs(v) for v in r["old_log_probs"]] for r in responses))) > 0
    assert rows(tmp_path)[0]["actor/rollout_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)


def test_kl_is_charged_before_groups_are_filtered(tmp_path, model):
    """All answers earn the same, so only the KL penalty can tell them apart."""
    overrides = ("algorithm.use_kl_in_reward=true", f"{FILTER}.metric=seq_final_reward", f"{FILTER}.max_staleness=0")
    ref = make_model(tmp_path / "ref", seed=3)
    t = trainer(tmp_path, model, *overrides, f"actor_rollout_ref.ref.path={ref}", reward=lambda prompt, response: 1.0)
    groups, report = t.parts.sampler.next_batch()
    assert report.fates["kept"] >= 4
    policy, reference = t.parts.policy, t.parts.roles.reference
    for rollout in groups[0].rollouts:
        ids = torch.tensor([groups[0].prompt.token_ids + rollout.token_ids])
        start = len(groups[0].prompt.token_ids) - 1
        with torch.no_grad():
            a, b = (m(ids).logits[0, start:-1].log_softmax(-1) for m in (policy.model, reference.scorer.model))
        chosen = torch.tensor(rollout.token_ids)[:, None]
        kl = (a.gather(1, chosen) - b.gather(1, chosen)).sum()
        assert rollout.reward.kl_penalty == pytest.approx(0.001 * float(kl), rel=1e-3)
        assert rollout.reward.final == rollout.reward.score - rollout.reward.kl_penalty
    t.close()


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae", "remax"])
def test_kl_in_the_reward_is_charged_to_every_token(tmp_path, model, estimator):
    """The advantages of a first step, from the logits of both models; the critic's values are 0 at first."""
    gamma, lam, beta = 0.95, 0.9 if estimator == "gae" else 1.0, 0.05
    ref = make_model(tmp_path / "ref", seed=3)
    words = [f"algorithm.adv_estimator={estimator}", f"algorithm.gamma={gamma}", f"algorithm.kl_ctrl.kl_coef={beta}"]
    words += [f"actor_rollout_ref.ref.path={ref}", "algorithm.use_kl_in_reward=true", f"{FILTER}.enable=false"]
    words += [f"algorithm.lam={lam}"] if estimator == "gae" else []
    train(tmp_path, model, *words, stop_after=1, reward=lambda prompt, response: 1.0)
    assert not any("timing_s/ref" in row for row in rows(tmp_path))  # scored for the reward, and not for a loss
    policy, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (model, ref))
    tokenizer = load_tokenizer("embedded")
    expected, seen = [], []
    for group in read_groups(tmp_path / "run" / "groups" / "step-000001.jsonl.gz"):
        prompt = tokenizer.apply_chat_template(group["messages"], add_generation_prompt=True, tokenize=True)
        prompt = list(prompt["input_ids"]) if not isinstance(prompt, list) else prompt
        for response in group["responses"]:
            ids = torch.tensor([prompt + response["token_ids"]])
            chosen = torch.tensor(response["token_ids"])[:, None]
            with torch.no_grad():
                a, b = (
                    m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, chosen).flatten()
                    for m in (policy, reference)
                )
            rewards = -beta * (a - b)
            rewards[-1] += 1.0
            returns, running = torch.zeros_like(rewards), 0.0
            for t in reversed(range(len(rewards))):
                running = float(rewards[t]) + gamma * lam * running
                returns[t] = running
            expected.append(returns - 1.0 if estimator == "remax" else returns)  # the greedy answer earns 1 as well
            seen.append(response["advantage"])
    every = torch.cat(expected)
    if estimator != "remax":
        expected = [(x - every.mean()) / (every.var() + 1e-8).sqrt() for x in expected]
    assert [float(x.mean()) for x in expected] == pytest.approx(seen, abs=2e-5)


def test_the_kl_term_of_the_loss_keeps_the_policy_near_its_start(tmp_path, model):
    ends = {}
    start = load_model(str(model)).state_dict()
    for coefficient in (0.0, 5.0):
        folder = tmp_path / str(coefficient)
        train(folder, model, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef={coefficient}")
        end = load_file(folder / "run" / "checkpoints" / "step-000004" / "model.safetensors")
        ends[coefficient] = sum((end[n] - start[n]).square().sum() for n in end)
        drift = [row["actor/kl_loss"] for row in rows(folder)] if coefficient else None
    assert drift[0] < 1e-2  # the first mini-batch is the reference itself
    assert ends[5.0] < ends[0.0]


def test_the_greedy_baseline_is_what_the_greedy_answer_earns(tmp_path, model):
    t = trainer(tmp_path, model, "algorithm.adv_estimator=remax")
    groups, _ = t.parts.sampler.next_batch()
    baselines, metrics = t.parts.baseline.score(groups, 0)
    weights = AutoModelForCausalLM.from_pretrained(model)
    wanted = []
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids])
        with torch.no_grad():
            first = int(weights(ids).logits[0, -1].argmax())
        text = t.parts.tokenizer.decode([first], skip_special_tokens=True)
        wanted += [float(bool(text) and ord(text[0]) % 2 == 0)] * len(group.rollouts)
    assert baselines.tolist() == wanted
    assert metrics["critic/greedy_score/mean"].result() == sum(wanted) / len(wanted)
    in_flight = t.parts.engine.num_in_flight
    again, _ = t.parts.baseline.score(groups, 0)
    assert torch.equal(again, baselines) and t.parts.engine.num_in_flight == in_flight
    t.close()


def test_a_greedy_answer_without_a_reward_leaves_the_groups_mean(tmp_path, model):
    t = trainer(tmp_path, model, "algorithm.adv_estimator=remax")
    groups, _ = t.parts.sampler.next_batch()

    class Failing:
        def submit(self, group):
            self.groups = [*getattr(self, "groups", []), group]

        def collect(self, num=None):
            groups, self.groups = self.groups, []
            return [g.with_rollouts(tuple(r.with_reward(None, "no") for r in g.rollouts)) for g in groups]

    t.parts.baseline._scorer = Failing()
    baselines, metrics = t.parts.baseline.score(groups, 0)
    mean = sum(r.reward.score for r in groups[0].rollouts) / len(groups[0].rollouts)
    assert baselines[0] == pytest.approx(mean)
    assert metrics["critic/greedy_failures"].result() == len(groups)
    t.close()


def test_adapters_on_another_base_are_refused(tmp_path):
    base = make_model(tmp_path / "base")
    train(tmp_path, base, f"{MODEL}.lora_rank=1", stop_after=1)
    make_model(tmp_path / "base", seed=9)  # the same folder, other weights
    with pytest.raises(ResumeRefused, match="weights that stay as they are"):
        train(tmp_path, base, f"{MODEL}.lora_rank=1")


def test_a_merged_checkpoint_answers_as_the_adapted_model(tmp_path, model):
    t = trainer(tmp_path, model, f"{MODEL}.lora_rank=2", f"{ACTOR}.optim.lr=1e-2")
    for _ in range(2):
        t.train_step()
    evaluator = t.parts.evaluator
    own = [g.rollouts[0].token_ids for g in evaluator.run(t.step).groups]
    t.close()
    merged = tmp_path / "run" / "checkpoints" / "step-000002"
    assert (merged / "training" / "adapter" / "adapter_config.json").is_file()
    other = trainer(tmp_path / "other", merged)
    assert [g.rollouts[0].token_ids for g in other.parts.evaluator.run(0).groups] == own
    start = trainer(tmp_path / "start", model)
    assert [g.rollouts[0].token_ids for g in start.parts.evaluator.run(0).groups] != own
    for t in (other, start):
        t.close()


def test_a_moved_clip_range_resumes(tmp_path, model):
    words = (f"{ACTOR}.clip_target=0.3", "trainer.total_training_steps=3", "trainer.val_before_train=false")
    train(tmp_path / "whole", model, *words)
    train(tmp_path / "twice", model, *words, stop_after=2)
    train(tmp_path / "twice", model, *words)
    seen = [[row["actor/clip_ratio_low"] for row in rows(tmp_path / name)] for name in ("whole", "twice")]
    assert seen[0] == seen[1] and len(set(seen[0])) == 3


def test_clip_target_holds_its_fraction(tmp_path, model):
    overrides = (
        "trainer.total_training_steps=40",
        "trainer.save_freq=-1",
        f"{ACTOR}.clip_target=0.3",
        f"{ACTOR}.clip_ratio_low=0.05",
        f"{ACTOR}.clip_ratio_high=0.05",
        f"{FILTER}.max_staleness=0",
    )
    train(tmp_path, model, *overrides)
    seen = rows(tmp_path)
    fractions = [row["actor/pg_clipfrac_later"] for row in seen]
    first, last = sum(fractions[:5]) / 5, sum(fractions[-20:]) / 20
    assert first < 0.15  # the range was too wide …
    assert seen[-1]["actor/clip_ratio_low"] < 0.02  # … and has been narrowed
    assert abs(last - 0.3) < 0.1
