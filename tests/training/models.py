"""Small random decoders of several families, for tests."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 64


def llama(seed: int = 0, **kw) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **kw})).eval()


def classifier(seed: int = 0, **kw) -> LlamaForSequenceClassification:
    """The same decoder with a score per text, that of its last token."""
    shape = llama(seed, **kw).config.to_dict()
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(LlamaConfig(**{**shape, "num_labels": 1, "pad_token_id": 0})).eval()


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)
    ).eval()


def gemma2(seed: int = 0) -> Gemma2ForCausalLM:
    torch.manual_seed(seed)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.2,
            final_logit_softcapping=5.0,
        )
    ).eval()


def qwen3_moe(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
    ).eval()


FAMILIES = {"llama": llama, "gpt2": gpt2, "gemma2": gemma2, "qwen3_moe": qwen3_moe}
