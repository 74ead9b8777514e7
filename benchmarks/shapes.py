"""The models that are measured (random weights of known shapes, tied embeddings), and the size of a step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

SHAPES: dict[str, Any] = {
    "tiny": lambda: LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
    ),
    "smol": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3,
    ),
    "qwen0.5b": lambda: Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2,
    ),
    "qwen1.5b": lambda: Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2,
    ),
}  # fmt: skip


def make_model(name: str, *, max_length: int, dtype: torch.dtype, device: str) -> Any:
    """A model of that shape with weights from seed 0."""
    config = SHAPES[name]()
    config.tie_word_embeddings = True
    config.max_position_embeddings = max(2048, max_length)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, None, 0
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options for the size of a step and where it runs."""
    sizes = {"prompts": 16, "group": 8, "plen": 32, "new": 64, "steps": 5, "minibatches": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--given", action="store_true", help="random answers, none generated: training alone")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")


def given_answer(number: int, length: int, vocab: int) -> list[int]:
    """The tokens of an answer that nobody generated."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, vocab - 1, (length,), generator=generator).tolist()
