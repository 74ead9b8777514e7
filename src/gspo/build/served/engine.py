"""The engine of a server, and how its prompts are read."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from gspo.build.device import choose_device, default_threads
from gspo.build.engines import pad_token, stop_tokens
from gspo.build.served.source import ModelSource
from gspo.environments.formats import find_format
from gspo.models import ModelError
from gspo.models.load import compute_dtype, load_config, load_generation_config, load_tokenizer
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.workers.worker import EngineSpec, build_engine
from gspo.serving.prompts import PromptReader

MAX_CPU_LENGTH, MAX_GPU_LENGTH = 4096, 32768  # unless asked for more
NUM_SLOTS = {"cpu": 64, "cuda": 256}


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine with what a server needs beside it."""

    engine: RolloutEngine
    reader: PromptReader
    tokenizer: Any
    max_length: int
    num_slots: int

    def decode(self, token_ids: Any) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    @property
    def token_text(self) -> Any:
        """The text of a token, special ones included."""
        return functools.lru_cache(1 << 16)(lambda token: self.tokenizer.decode([token]))


def open_engine(
    source: ModelSource,
    *,
    kind: str = "native",
    num_slots: int | None = None,
    max_length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    memory_utilization: float = 0.8,
    tool_format: str | None = None,
    trust_remote_code: bool = False,
) -> ServedEngine:
    """Load the model into an engine of this kind, and its tokenizer."""
    place = choose_device(device)
    tokenizer = load_tokenizer(source.path, trust_remote_code=trust_remote_code)
    config = load_config(source.path, trust_remote_code=trust_remote_code).get_text_config()
    stops = stop_tokens(load_generation_config(source.path, trust_remote_code=trust_remote_code), tokenizer)
    num_slots = num_slots or NUM_SLOTS.get(place.type, 64)
    length = _choose_length(config, max_length, on_gpu=place.type == "cuda")
    options = {
        "native": {"memory_utilization": memory_utilization, "share_prefixes": True},
        "vllm": {"gpu_memory_utilization": memory_utilization, "enable_prefix_caching": True},
    }
    spec = EngineSpec(
        kind=kind,
        model=source.path,
        tokenizer=source.path,
        num_slots=num_slots,
        max_length=length,
        eos_token_ids=tuple(stops),
        pad_token_id=pad_token(tokenizer, stops),
        dtype=compute_dtype(dtype, place),
        device=str(place),
        num_threads=default_threads(),
        trust_remote_code=trust_remote_code,
        options=options.get(kind, {}),
    )
    wanted = tool_format or source.settings.get("actor_rollout_ref.rollout.multi_turn.format") or "auto"
    reader = PromptReader(
        tokenizer,
        int(config.vocab_size),
        find_format(wanted, tokenizer),
        source.settings.get("data.apply_chat_template_kwargs") or {},
    )
    return ServedEngine(build_engine(spec), reader, tokenizer, length, num_slots)


def _choose_length(config: Any, wanted: int | None, *, on_gpu: bool) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        return min(limit or MAX_CPU_LENGTH, MAX_GPU_LENGTH if on_gpu else MAX_CPU_LENGTH)
    if limit is not None and wanted > limit:
        raise ModelError(f"--max-model-len {wanted}: this model has at most {limit} positions")
    return wanted
