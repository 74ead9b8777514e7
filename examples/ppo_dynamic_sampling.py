"""PPO with a critic, KL in the reward and dynamic sampling, from Python.

python examples/ppo_dynamic_sampling.py
"""

from __future__ import annotations

from typing import Any

from gspo.data.datasets import load_rows
from gspo.data.tasks.arithmetic import score
from gspo.trainer.config import (
    ActorRolloutRefConfig,
    AlgoConfig,
    CriticConfig,
    DataConfig,
    FilterGroupsConfig,
    OptimConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
)
from gspo.trainer.ppo import PPOTrainerWithSampling
from gspo.types import Prompt, Reward


def reward_fn(prompt: Prompt, response: str) -> Reward:
    """Our own signature: a Reward with a score."""
    return Reward(score=score(response, prompt.ground_truth))


def val_reward_fn(prompt: Prompt, response: str) -> Reward:
    """Held-out answers are judged by accuracy."""
    right = score(response, prompt.ground_truth)
    return Reward(score=right, acc=right)


def make_config() -> TrainerConfig:
    """GAE advantages, 4 answers a prompt, the critic warmed up before the policy moves."""
    return TrainerConfig(
        algorithm=AlgoConfig(
            adv_estimator="gae",
            use_kl_in_reward=True,
            filter_groups=FilterGroupsConfig(enable=True, metric="seq_reward", max_num_gen_batches=5),
        ),
        data=DataConfig(gen_batch_size=64, train_batch_size=32),
        actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(n=4)),
        critic=CriticConfig(optim=OptimConfig(lr=1e-3)),
        trainer=PPOTrainerConfig(critic_warmup=3, total_training_steps=10),
    )


def main(config: TrainerConfig | None = None) -> dict[str, Any]:
    """Train; the result."""
    trainer = PPOTrainerWithSampling(
        config=config or make_config(),
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
        train_dataset=load_rows("arithmetic", "train", limit=2048),
        val_dataset=load_rows("arithmetic", "val", limit=128),
    )
    return trainer.fit()


if __name__ == "__main__":
    print(main())
