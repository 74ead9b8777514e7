"""From a config to the models of one trainer rank. Runs in the rank's own process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gspo.build.device import default_threads, use_only_deterministic
from gspo.build.engines import build_engine
from gspo.build.models import build_roles, load_weights
from gspo.config import TrainerConfig
from gspo.distributed.rank_worker import RankModels
from gspo.models.load import compute_dtype
from gspo.plugins import import_plugins
from gspo.rollout.workers.worker import Wrapper
from gspo.training.parallel.fsdp import Shards, ShardSettings


def build_rank(
    config: TrainerConfig,
    total_steps: int,
    weights_from: Path | None,
    tokenizer: Any,
    episodes: Wrapper | None,
    device: torch.device,
) -> RankModels:
    """The models of the config in shards. With a tokenizer also an engine over a full copy of the policy."""
    import_plugins(config.trainer.plugins)
    torch.set_num_threads(config.trainer.num_threads or default_threads())
    use_only_deterministic(config.trainer.deterministic)
    dtype = getattr(torch, compute_dtype(config.actor_rollout_ref.model.dtype, device))
    sharing = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size

    def shard(model: nn.Module, settings: ShardSettings) -> Shards:
        return Shards(model, device, dataclasses.replace(settings, compute_dtype=dtype, ranks_per_sequence=sharing))

    models = RankModels(build_roles(config, device, total_steps, weights_from, shard))
    if tokenizer is not None:
        path = str(weights_from or config.actor_rollout_ref.model.path)
        models.engine_model = load_weights(config, device, path).eval().requires_grad_(False)
        models.engine = build_engine(config, models.engine_model, tokenizer, device, episodes)
    return models
