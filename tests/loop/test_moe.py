"""GSPO trains mixture-of-experts models as they are: expert choices flip under it and nothing is replayed."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.models.load import load_tokenizer
from tests.loop.runs import rows, train

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}


def make_moe(folder, kind: str):
    torch.manual_seed(0)
    tokenizer = load_tokenizer("embedded")
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, **ids))
        if kind == "qwen3_moe"
        else MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, **ids))
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_gspo_learns_on_a_small_moe_without_routing_replay(tmp_path, kind):
    model = make_moe(tmp_path / "model", kind)
    train(
        tmp_path,
        model,
        "trainer.total_training_steps=20",
        "trainer.save_freq=-1",
        "data.max_response_length=3",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.clip_ratio_low=0.02",
        "actor_rollout_ref.actor.clip_ratio_high=0.02",
        "actor_rollout_ref.actor.optim.lr=3e-3",
    )
    seen = rows(tmp_path)
    scores = [row["critic/score_all/mean"] for row in seen]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.1
    changes = [row["actor/router_change"] for row in seen]
    assert all(0 <= change < 1 for change in changes) and sum(changes) / len(changes) > 0.01
    assert max(row["actor/seq_importance_ratio/max"] for row in seen) < 3
    assert sum(row["actor/skipped_updates"] for row in seen) == 0
