"""Small random decoders of several families, and requests to run on them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.native.engine import NativeEngine
from gspo.types import Prompt

VOCAB = 64
EOS, PAD = 1, 0

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 2,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": VOCAB,
    "initializer_range": 0.3,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_SHAPE),
    "qwen2": lambda: hf.Qwen2Config(**_SHAPE),
    "qwen2-sliding": lambda: hf.Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=6, layer_types=_LAYERS),
    "qwen3": lambda: hf.Qwen3Config(**_SHAPE),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_SHAPE, **_MOE),
    "mixtral": lambda: hf.MixtralConfig(**_SHAPE, num_local_experts=4, sliding_window=6),
    "mistral": lambda: hf.MistralConfig(**_SHAPE, sliding_window=6),
    "gemma": lambda: hf.GemmaConfig(**_SHAPE),
    "gemma2": lambda: hf.Gemma2Config(
        **_SHAPE, sliding_window=6, layer_types=_LAYERS, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_SHAPE, sliding_window=6, layer_types=_LAYERS, query_pre_attn_scalar=8),
    "gpt2": lambda: hf.GPT2Config(**_GPT2, bos_token_id=2, eos_token_id=EOS, pad_token_id=PAD),
}
# Gemma 2 caps attention scores, which transformers' sdpa leaves out: its eager attention is the exact one.
EAGER = ("gemma2",)


def make_model(kind: str = "llama", attention: str | None = None, seed: int = 0) -> Any:
    """A random model whose logits differ enough between tokens that greedy choices are never near a tie."""
    torch.manual_seed(seed)
    attention = attention or ("eager" if kind in EAGER else "sdpa")
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention)
    return model.float().eval()


def make_engine(model: Any, *, num_slots: int = 8, max_length: int = 64, **options: Any) -> NativeEngine:
    options = {"eos_token_ids": (EOS,), "pad_token_id": PAD, "decode_chunk": 4, **options}
    return NativeEngine(
        model, lambda ids: " ".join(map(str, ids)), num_slots=num_slots, max_length=max_length, **options
    )


def make_prompt(number: int, length: int) -> Prompt:
    tokens = tuple(3 + (number * 13 + 7 * i + i * i) % (VOCAB - 3) for i in range(length))
    return Prompt(uid=f"p{number}", messages=(), token_ids=tokens)


def make_request(
    number: int, *, n: int = 2, length: int | None = None, seed: int = 5, version: int = 0, **params: Any
) -> GroupRequest:
    params = {"max_tokens": 12, **params}
    prompt = make_prompt(number, length if length is not None else 3 + number % 7)
    return GroupRequest(prompt, number, n, version, SamplingParams(**params), seed)


def drain(engine: Any, limit: int = 1000) -> list[Any]:
    """Step until nothing is in flight; the groups in the order they were handed out."""
    groups: list[Any] = []
    for _ in range(limit):
        if not engine.num_in_flight:
            return groups
        groups += engine.step()
    raise AssertionError("the engine did not finish")


def plain_log_probs(
    model: Any, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0
) -> list[float]:
    """Log-probs of a response by one full forward of the model on its own."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
