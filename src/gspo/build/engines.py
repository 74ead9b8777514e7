"""The rollout engine of a run: over the trainer's own modules, or a fleet of worker processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.build.role_settings import FLEX_ATTENTION
from gspo.config import TrainerConfig
from gspo.distributed.backend import Backend
from gspo.distributed.gpu_place import gpu_place
from gspo.distributed.launch import trainer_gpus
from gspo.distributed.run_layout import num_rollout_workers, rollout_dtype, runs_ahead
from gspo.environments.pool import EpisodePool
from gspo.models.load import load_generation_config
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.native.engine import NativeEngine
from gspo.rollout.vllm.settings import require_vllm
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.connection import Connection
from gspo.rollout.workers.cuda_weight_store import CudaWeights
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.rollout.workers.process import ProcessConnection
from gspo.rollout.workers.weight_store import SharedWeights, WeightStore
from gspo.rollout.workers.worker import ENGINES, EngineSpec, Wrapper
from gspo.training.roles import Roles


def num_workers(config: TrainerConfig, backend: Backend | None = None) -> int:
    """The number of rollout worker processes; 0 when the trainer's process or its ranks generate."""
    return num_rollout_workers(config) if backend is None else backend.num_rollout_workers()


def check_engine(config: TrainerConfig, backend: Backend | None = None) -> None:
    """Refuse an engine that is unknown or not installed here, before anything is loaded. A cluster checks its own nodes."""
    name = config.actor_rollout_ref.rollout.name
    ENGINES.check(name)
    if name == "vllm" and backend is None:
        require_vllm()


def build_fleet(
    config: TrainerConfig,
    roles: Roles,
    tokenizer: Any,
    device: torch.device,
    count: int,
    *,
    backend: Backend | None = None,
    folder: Path | None = None,
    notify: Callable[[str], None] | None = None,
    episodes: Wrapper | None = None,
) -> RolloutEngine:
    """A fleet of `count` rollout workers. They log to `folder`; `notify` gets a sentence for each that fails.

    With `episodes` every worker has environments of its own.
    """
    spec = dataclasses.replace(engine_spec(config, tokenizer, device, count), episodes=episodes)
    if backend is None:
        connect, store = _local(spec, trainer_gpus(device), folder)
    else:
        connect, store = functools.partial(backend.connect, spec), backend.weights()
    kind = AsyncFleet if runs_ahead(config) else LockstepFleet
    return kind(
        connect,
        count,
        weights=lambda: published_weights(roles),
        store=store,
        timeout=config.actor_rollout_ref.rollout.worker_timeout,
        notify=notify,
    )


def _local(
    spec: EngineSpec, training: Collection[int], folder: Path | None
) -> tuple[Callable[[int], Connection], WeightStore]:
    """Workers that are processes of this machine, whose GPUs `training` train."""

    def connect(index: int) -> Connection:
        log = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"rollout-{index}.log"
        return ProcessConnection(_placed(spec, index, training), index, log)

    return connect, CudaWeights() if spec.device.startswith("cuda") else SharedWeights()


def _placed(spec: EngineSpec, index: int, training: Collection[int]) -> EngineSpec:
    """The spec of the `index`-th worker of this machine, on the device it gets."""
    if not spec.device.startswith("cuda"):
        return spec.on_device(spec.device, shared=False)
    num_gpus = torch.cuda.device_count()
    place = gpu_place(index, num_gpus, training, spec.options.get("tensor_parallel_size", 1))
    device = spec.device if num_gpus == 1 else f"cuda:{place.first}"
    return spec.on_device(device, shared=place.shared)


def engine_spec(config: TrainerConfig, tokenizer: Any, device: torch.device, count: int = 1) -> EngineSpec:
    """How one of `count` workers builds its engine, with its share of the cores; the trainer may need a share too."""
    c, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    stops = stop_tokens(
        load_generation_config(c.path, c.override_config, trust_remote_code=c.trust_remote_code), tokenizer
    )
    return EngineSpec(
        kind=rollout.name,
        model=c.path,
        tokenizer=c.tokenizer_path or c.path,
        num_slots=rollout.max_num_seqs,
        max_length=_max_length(config),
        eos_token_ids=tuple(stops),
        pad_token_id=pad_token(tokenizer, stops),
        dtype=rollout_dtype(config, device),
        device=str(device),
        num_threads=max(1, torch.get_num_threads() // (count + runs_ahead(config))),
        trust_remote_code=c.trust_remote_code,
        attn_implementation=None if c.attn_implementation == FLEX_ATTENTION else c.attn_implementation,
        override_config=dict(c.override_config),
        options=_options(config),
        plugins=tuple(config.trainer.plugins),
    )


def _options(config: TrainerConfig) -> dict[str, Any]:
    """Options of the engine of this name. A user's engine gets `rollout.engine_kwargs`."""
    rollout = config.actor_rollout_ref.rollout
    options = {"native": native_options, "vllm": _vllm_options}.get(rollout.name)
    return dict(rollout.engine_kwargs) if options is None else options(config)


def native_options(config: TrainerConfig) -> dict[str, Any]:
    """How the native engine uses a GPU."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "prefill_tokens": rollout.max_num_batched_tokens,
        "memory_utilization": rollout.gpu_memory_utilization,
        "eager": rollout.enforce_eager,
        "free_cache": _frees_cache(config) and not rollout.keep_cache,
        "keep_cache": rollout.keep_cache,
    }


def _frees_cache(config: TrainerConfig) -> bool:
    """Whether an engine frees its cache while the trainer works: only one that waits for the trainer can."""
    return config.actor_rollout_ref.rollout.free_cache_engine and not runs_ahead(config)


def _vllm_options(config: TrainerConfig) -> dict[str, Any]:
    """Options of vLLM: fields of VllmSettings."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "sleep": _frees_cache(config),
        "engine_kwargs": dict(rollout.engine_kwargs),
    }


def build_engine(
    config: TrainerConfig,
    model: Any,
    tokenizer: Any,
    device: torch.device,
    episodes: Wrapper | None = None,
    pool: EpisodePool | None = None,
) -> RolloutEngine:
    """The rollout engine over `model`'s own tensors; with `episodes` its rollouts talk to environments, in `pool`."""
    stops = stop_tokens(model.generation_config, tokenizer)
    engine = NativeEngine(
        model,
        functools.partial(tokenizer.decode, skip_special_tokens=True),
        eos_token_ids=stops,
        pad_token_id=pad_token(tokenizer, stops),
        num_slots=config.actor_rollout_ref.rollout.max_num_seqs,
        max_length=_max_length(config),
        device=device,
        **native_options(config),
    )
    if episodes is None:
        return engine
    return episodes.wrap(engine, tokenizer, eos_token_ids=stops, max_length=_max_length(config), pool=pool)


def stop_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's eos and those of the model's generation config."""
    found = [tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)]
    flat = [t for item in found for t in (item if isinstance(item, list | tuple) else [item])]
    return sorted({int(t) for t in flat if t is not None})


def pad_token(tokenizer: Any, stops: list[int]) -> int:
    """The token that fills up batches: the tokenizer's own, or one that ends a response."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops[0] if stops else 0)


def _max_length(config: TrainerConfig) -> int:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    prompt = rollout.prompt_length or data.max_prompt_length
    return rollout.max_model_len or prompt + (rollout.response_length or data.max_response_length)


@contextmanager
def published_weights(roles: Roles) -> Iterator[Mapping[str, Tensor]]:
    """The weights that workers get: the policy's tensors under the plain model's names, each tied tensor once."""
    with roles.published_weights() as tensors:
        yield _drop_tied_duplicates(tensors)


def _drop_tied_duplicates(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep one name per tied tensor; the receiver's model ties them itself."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen or not tensor.numel():
            kept[name] = tensor
        seen.add(place)
    return kept
