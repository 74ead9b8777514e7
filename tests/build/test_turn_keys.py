"""Keys of environments and turns, of masks and of advantages: what each changes in what is built and trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.build.environments import episode_settings
from gspo.build.settings import build_objective
from gspo.config import TrainerConfig, load
from gspo.environments.loading import EnvironmentSpec
from gspo.loop.trainer import Trainer
from gspo.rollout.episodes.dialogue import DialogueSettings
from gspo.rollout.episodes.settings import EpisodeSettings
from gspo.runs.console import Console
from gspo.serving.agents.settings import AgentSettings
from gspo.types import Group, Prompt, Rollout, ScoredBatch, Turn
from tests.equations.test_turn_credit import batch as batch_of_turns
from tests.rollout.episodes.world import make_dialogue, make_tokenizer
from tests.support.small_run import config as small_config
from tests.support.small_run import even_first_byte

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"


def config(*overrides: str) -> TrainerConfig:
    return load(None, ["actor_rollout_ref.model.path=some/model", *overrides]).config


EPISODES = (
    f"{TURNS}.max_assistant_turns=5",
    f"{TURNS}.max_user_turns=4",
    f"{TURNS}.max_parallel_calls=3",
    f"{TURNS}.max_tool_response_length=7",
    f"{TURNS}.tool_response_truncate_side=left",
    f"{TURNS}.format=tag",
    "environment.num_workers=2",
    "environment.timeout=8",
    "environment.tool_timeout=6",
    "environment.memory=300",
    "environment.retries=9",
    "environment.lag=11",
    "environment.max_failure_rate=0.4",
    "data.apply_chat_template_kwargs={enable_thinking: false}",
)


def test_episodes_have_every_key_of_their_sections():
    wanted = EpisodeSettings(
        spec=EnvironmentSpec("guess", kwargs={"high": 64}),
        dialogue=DialogueSettings(5, 4, 3, 7, "left"),
        tool_format="tag",
        num_workers=2,
        timeout=8,
        tool_timeout=6,
        memory=300,
        retries=9,
        lag=11,
        template_options={"enable_thinking": False},
    )
    named = ("environment.name=guess", "environment.kwargs={high: 64}")
    assert episode_settings(config(*EPISODES, *named)) == wanted
    for key in ("function_tool_path", "tool_config_path"):
        found = episode_settings(config(*EPISODES, f"{TURNS}.{key}=tools"))
        assert found == dataclasses.replace(wanted, spec=EnvironmentSpec(None, **{key: "tools"}))
    path = episode_settings(config("environment.path=mine.py"))
    assert isinstance(path, EpisodeSettings) and path.spec.path == "mine.py"
    agent = episode_settings(config(*EPISODES, "environment.agent=mine.py:run", "environment.kwargs={a: 1}"))
    assert agent == AgentSettings("mine.py:run", {"a": 1}, "tag", 8, 11, {"enable_thinking": False})
    assert episode_settings(config(*EPISODES, *named, f"{TURNS}.enable=false")) is None


def test_calls_beyond_the_limit_of_a_turn_are_errors_that_the_model_sees():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    tokens = make_tokenizer()(3 * call)["input_ids"]
    for most in (1, 2, 3):
        calls = make_dialogue("hermes", max_calls=most).action(tokens, 0, was_cut=False).tool_calls
        assert [call.error for call in calls[:most]] == [None] * most
        assert [call.error for call in calls[most:]] == [f"at most {most} call{'s' * (most > 1)} per turn"] * (most < 3)


def scored() -> ScoredBatch:
    found = batch_of_turns()
    return found.with_old(torch.zeros(found.mask.shape, dtype=torch.float64))


def advantages(*overrides: str) -> list[list[float]]:
    """Of two rollouts of a group: turns of 2 tokens and 1 with the rewards 0.5 and 0.75, and one turn of 3 with 2."""
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo_token"
    return build_objective(config(loss, *overrides)).with_advantages(scored()).advantages.tolist()


def test_returns_to_go_are_discounted_by_turn():
    to_go = "algorithm.turn_rewards=return_to_go"
    assert advantages(to_go) == [[-0.75, -0.75, 0, 0.75], [0.75, 0.75, 0.75, 0]]
    half = 0.5 + 0.5 * 0.75
    first = half - 2
    assert advantages(to_go, "algorithm.turn_discount=0.5") == [[first, first, 0, 0.75], [-first, -first, -first, 0]]
    whole = advantages("algorithm.norm_adv_by_std_in_grpo=false")  # the outcome is 1.25, against 2
    assert whole == [[-0.375, -0.375, 0, -0.375], [0.375, 0.375, 0.375, 0]]


def test_advantages_are_divided_by_the_deviation_of_their_level_and_whitened():
    def computed(*overrides: str) -> torch.Tensor:
        rewards = torch.tensor([[0.0], [1.0], [0.0], [4.0]], dtype=torch.float64)
        groups = torch.tensor([0, 0, 1, 1])
        return build_objective(config(*overrides)).advantage(rewards, torch.ones(4, 1), groups)[0][:, 0]

    group, batch = computed(), computed("algorithm.std_level=batch")
    rewards = torch.tensor([0.0, 1.0, 0.0, 4.0], dtype=torch.float64)
    assert group[1].item() == pytest.approx(group[3].item(), rel=1e-4) != batch[1].item()
    assert batch.tolist() == pytest.approx((torch.tensor([-0.5, 0.5, -2, 2]) / rewards.std()).tolist(), rel=1e-4)
    to_go = "algorithm.turn_rewards=return_to_go"
    plain, white = advantages(to_go), advantages(to_go, "algorithm.normalize_advantages=true")
    mask = scored().mask.bool()
    values, own = torch.tensor(white)[mask], torch.tensor(plain)[mask]
    assert values.mean().item() == pytest.approx(0.0, abs=1e-6) != own.mean().item()
    assert torch.allclose(values, (own - own.mean()) / own.std(), atol=1e-4)


def test_a_teacher_adds_its_preference_with_its_weight():
    teacher = torch.full((2, 4), -0.5, dtype=torch.float64)
    batch = dataclasses.replace(scored(), ref_log_probs=teacher)
    words = ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo_token", "actor_rollout_ref.ref.path=org/teacher")
    plain = build_objective(config(words[0]))
    both = build_objective(config(*words, "algorithm.distill_weight=0.5"))
    added = both.with_advantages(batch).advantages - plain.with_advantages(batch).advantages
    assert added.tolist() == (-0.25 * batch.mask).tolist()


@pytest.mark.parametrize(("key", "trained"), [("mask_malformed_turns", [0, 1, 1]), ("mask_truncated", [0, 0, 0])])
def test_a_masked_turn_or_response_is_not_trained_on(tmp_path, model, key, trained):
    """Every response is cut at the limit, and its first token is made a turn with a call that cannot be read."""
    words = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.val_after_train=false")
    ignored = (f"{ROLLOUT}.ignore_eos=true", "data.max_response_length=3")
    resolved = small_config(tmp_path, model, *words, *ignored, f"algorithm.{key}=true")
    trainer = Trainer(resolved, reward_fn=even_first_byte, console=Console(enabled=False))
    draw, score, seen = trainer.parts.sampler.next_batch, trainer.parts.roles.policy.score, []

    def next_batch():
        groups, counts = draw()
        turns = (Turn(0, 1, malformed=True), Turn(1, 3))
        return [
            dataclasses.replace(g, rollouts=tuple(dataclasses.replace(r, turns=turns) for r in g.rollouts))
            for g in groups
        ], counts

    trainer.parts.sampler.next_batch = next_batch
    trainer.parts.roles.policy.score = lambda batch: (seen.append(batch.mask), score(batch))[1]
    trainer.fit()
    assert seen[0].tolist() == [trained] * 16


def test_a_reward_function_for_held_out_rows_alone_adds_to_the_rewards_of_an_agent(tmp_path, model):
    agent = tmp_path / "agent.py"
    agent.write_text("def run(row):\n    return 1.0\n")
    resolved = small_config(tmp_path, model, f"environment.agent={agent}:run")
    trainer = Trainer(resolved, val_reward_fn=lambda prompt, response: 0.25, console=Console(enabled=False))
    played = Rollout((1,), (0.0,), (1,), (0,), "stop", turns=(Turn(0, 1, reward=1.0),))
    found = []
    for scorer in trainer.parts.scorers:
        scorer.submit(Group(Prompt("row", (), (1,), "nothing"), (played,), 0, 0))
        found += [rollout.reward for group in scorer.collect() for rollout in group.rollouts]
    trainer.close()
    assert [reward.score for reward in found] == [1.0, 1.25]
