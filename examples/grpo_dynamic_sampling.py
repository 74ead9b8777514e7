"""GRPO with dynamic sampling from Python, under verl's names, with a reward function and rows of one's own.

    python examples/grpo_dynamic_sampling.py

Trains the embedded model for a few steps on sums; takes a minute or two without a GPU.
"""

from __future__ import annotations

from typing import Any

from gspo.data.datasets import load_rows
from gspo.models.load import load_tokenizer
from gspo.trainer.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    DataConfig,
    FilterGroupsConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
)
from gspo.trainer.ppo import PPOTrainerWithSampling


def reward_fn(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """verl's signature: right when the number after the last `;` is the sum. `acc` is what groups are filtered on."""
    right = float(solution_str.rsplit(";", 1)[-1].strip() == ground_truth)
    return {"score": right, "acc": right}


def make_config() -> TrainerConfig:
    """GRPO, 5 answers a prompt, groups of one accuracy left out, KL against the start in the loss."""
    return TrainerConfig(
        algorithm=AlgoConfig(
            adv_estimator="grpo",
            use_kl_in_reward=False,
            norm_adv_by_std_in_grpo=True,
            filter_groups=FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=10),
        ),
        data=DataConfig(gen_batch_size=96, train_batch_size=32),
        actor_rollout_ref=ActorRolloutRefConfig(
            rollout=RolloutConfig(n=5), actor=ActorConfig(use_kl_loss=True, kl_loss_coef=0.001)
        ),
        trainer=PPOTrainerConfig(critic_warmup=0, total_training_steps=10),
    )


def main(config: TrainerConfig | None = None) -> dict[str, Any]:
    """Train on rows of our own; the result."""
    trainer = PPOTrainerWithSampling(
        config=config or make_config(),
        tokenizer=load_tokenizer("embedded"),
        reward_fn=reward_fn,
        train_dataset=load_rows("arithmetic", "train", limit=2048),
        val_dataset=load_rows("arithmetic", "val", limit=128),
    )
    return trainer.fit()


if __name__ == "__main__":
    print(main())
