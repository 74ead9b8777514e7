"""Make an untrained mixture of experts with the embedded model's tokenizer, small enough for a CPU.

    python scripts/make_moe_model.py OUT [--experts 16] [--active 2] [--seed 0]

`gspo sft --model OUT --data arithmetic` warms it up. recipes/proof/moe.yaml trains it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.models.load import load_tokenizer


def make(out: Path, *, experts: int, active: int, seed: int) -> int:
    """Write the model as a Hugging Face folder; returns the number of its parameters."""
    tokenizer = load_tokenizer("embedded")
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=144,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=36,
            moe_intermediate_size=96,
            num_experts=experts,
            num_experts_per_tok=active,
            norm_topk_prob=True,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model.num_parameters()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--active", type=int, default=2, help="experts per token")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{make(args.out, experts=args.experts, active=args.active, seed=args.seed):,} parameters in {args.out}")
