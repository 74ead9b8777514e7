"""A run of seconds: a small random model, short answers, and a reward that gives groups a spread."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from gspo.config import ResolvedConfig, load
from gspo.models.load import load_reward_model, load_tokenizer
from gspo.types import Reward


def make_model(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """A Llama of 30 thousand parameters with the embedded model's tokenizer."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("embedded")
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    LlamaForCausalLM(LlamaConfig(**{**config, **shape})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_reward_model(folder: Path, decoder: str, seed: int = 0) -> Path:
    """A classifier with a random score over the layers of a decoder."""
    classifier = load_reward_model(decoder, new_head=True)
    numbers = torch.Generator().manual_seed(seed)
    classifier.score.weight.data.normal_(generator=numbers)
    classifier.save_pretrained(folder)
    load_tokenizer(decoder).save_pretrained(folder)
    return folder


def even_first_byte(prompt: Any, response: str) -> Reward:
    """Right when the first character's code is even: about half of a random model's answers, and learnable."""
    right = float(bool(response) and ord(response[0]) % 2 == 0)
    return Reward(score=right, acc=right)


def config(folder: Path, model: Path, *overrides: str) -> ResolvedConfig:
    """Four groups of four short answers per step, two optimiser steps, one checkpoint per step."""
    return load(
        None,
        [
            f"actor_rollout_ref.model.path={model}",
            f"trainer.default_local_dir={folder}",
            "trainer.experiment_name=run",
            "trainer.total_training_steps=4",
            "trainer.save_freq=1",
            "trainer.num_threads=1",
            "data.train_files=arithmetic",
            "data.num_train_samples=64",
            "data.num_val_samples=16",
            "data.max_prompt_length=24",
            "data.max_response_length=6",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.clip_ratio_low=0.003",
            "actor_rollout_ref.actor.clip_ratio_high=0.004",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.max_num_seqs=16",
            "algorithm.filter_groups.enable=true",
            *overrides,
        ],
    )


def final_state(run: Path) -> dict[str, str]:
    """Digests of all that a run must reproduce: weights, optimiser, sampler, metric rows, groups, evaluations."""
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    state["counters"].pop("seconds")
    state.pop("config")
    rows = [
        {
            k: v
            for k, v in json.loads(line).items()
            if not k.startswith(("timing_s/", "perf/", "rollout/", "environment/seconds"))
        }
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    out = {
        "step": checkpoint.name,
        "weights": _digest(load_file(checkpoint / "model.safetensors")),
        "state": hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest(),
        "rows": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }
    for file in sorted((checkpoint / "training").rglob("*.safetensors")):
        out[f"training/{file.stem}"] = _digest(load_file(file))
    for folder in ("groups", "evals"):
        for file in sorted((run / folder).glob("*.gz")):
            out[f"{folder}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return out


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
