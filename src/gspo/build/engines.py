"""Which rollout engine a run gets: the trainer's own modules, or a fleet of workers in processes of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.build.models import compute_dtype
from gspo.build.role_settings import FLEX_ATTENTION
from gspo.config import TrainerConfig
from gspo.distributed.backend import Backend
from gspo.distributed.gpu_place import gpu_place
from gspo.distributed.launch import trainer_gpus
from gspo.distributed.rank_engine import RankEngine
from gspo.distributed.rank_roles import RankRoles
from gspo.models import resolve
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.native.engine import NativeEngine
from gspo.rollout.vllm.settings import require_vllm
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.connection import Connection
from gspo.rollout.workers.cuda_weight_store import CudaWeights
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.rollout.workers.process import ProcessConnection
from gspo.rollout.workers.weight_store import SharedWeights, WeightStore
from gspo.rollout.workers.worker import EngineSpec
from gspo.training.roles import Roles

CACHE_FREEING_OPTIONS = (
    "sleep",
    "free_cache",
)  # options by which engines free their cache while the trainer works


def num_workers(config: TrainerConfig, backend: Backend | None = None) -> int:
    """Rollout workers in processes of their own; 0 when the trainer's own process generates."""
    if backend is not None:
        return backend.num_rollout_workers()
    rollout = config.actor_rollout_ref.rollout
    # vLLM changes much of the process it runs in, and a process that dies is replaced.
    apart = rollout.mode == "async" or rollout.num_workers > 1 or rollout.name == "vllm"
    return rollout.num_workers if apart else 0


def runs_ahead(config: TrainerConfig) -> bool:
    """Whether rollouts are generated while the trainer trains. With a budget of 0 versions nothing can be."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.mode == "async" and rollout.max_head_offpolicyness > 0


def check_engine(config: TrainerConfig, backend: Backend | None = None) -> None:
    """Refuse an engine that is not installed here, before anything is loaded. A cluster's machines have their own."""
    if config.actor_rollout_ref.rollout.name == "vllm" and backend is None:
        require_vllm()


def build_rollout(
    config: TrainerConfig,
    roles: Roles | RankRoles,
    tokenizer: Any,
    device: torch.device,
    *,
    backend: Backend | None = None,
    folder: Path | None = None,
    notify: Callable[[str], None] | None = None,
) -> RolloutEngine:
    """The engine that the config asks for. Logs of worker processes go to `folder`; `notify` is told what befalls them."""
    count = num_workers(config, backend)
    if not count:
        if isinstance(roles, RankRoles):
            return RankEngine(roles.team)
        return build_engine(config, roles.policy.model, tokenizer, device)
    spec = engine_spec(config, tokenizer, device, count)
    if backend is None:
        connect, store = _local(spec, trainer_gpus(device), folder)
    else:
        connect, store = functools.partial(backend.connect, spec), backend.weights()
    kind = AsyncFleet if runs_ahead(config) else LockstepFleet
    return kind(
        connect,
        count,
        weights=lambda: current_weights(roles),
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
        return on_device(spec, spec.device, shared=False)
    num_gpus = torch.cuda.device_count()
    place = gpu_place(index, num_gpus, training, spec.options.get("tensor_parallel_size", 1))
    device = spec.device if num_gpus == 1 else f"cuda:{place.first}"
    return on_device(spec, device, shared=place.shared)


def on_device(spec: EngineSpec, device: str, *, shared: bool) -> EngineSpec:
    """The spec of a worker on `device`. Memory that no trainer rank shares need not be given back while it trains."""
    keeps = {} if shared else {name: False for name in CACHE_FREEING_OPTIONS if name in spec.options}
    return dataclasses.replace(spec, device=device, options={**spec.options, **keeps})


def engine_spec(config: TrainerConfig, tokenizer: Any, device: torch.device, count: int = 1) -> EngineSpec:
    """How one of `count` workers builds its engine, with its share of the processor, which the trainer may use too."""
    c, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    stops = stop_tokens(_generation_config(c.path, c.trust_remote_code), tokenizer)
    return EngineSpec(
        kind=rollout.name,
        model=c.path,
        tokenizer=c.tokenizer_path or c.path,
        num_slots=rollout.max_num_seqs,
        max_length=_max_length(config),
        eos_token_ids=tuple(stops),
        pad_token_id=_pad_token(tokenizer, stops),
        dtype=compute_dtype(config, device) if rollout.dtype == "auto" else rollout.dtype,
        device=str(device),
        num_threads=max(1, torch.get_num_threads() // (count + runs_ahead(config))),
        trust_remote_code=c.trust_remote_code,
        attn_implementation=None if c.attn_implementation == FLEX_ATTENTION else c.attn_implementation,
        override_config=dict(c.override_config),
        options=_vllm_options(config) if rollout.name == "vllm" else native_options(config),
    )


def native_options(config: TrainerConfig) -> dict[str, Any]:
    """What the native engine makes of a GPU."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "prefill_tokens": rollout.max_num_batched_tokens,
        "memory_utilization": rollout.gpu_memory_utilization,
        "eager": rollout.enforce_eager,
        "free_cache": _frees_cache(config),
    }


def _frees_cache(config: TrainerConfig) -> bool:
    """Whether an engine frees its cache while the trainer works: only one that waits for the trainer can."""
    return config.actor_rollout_ref.rollout.free_cache_engine and not runs_ahead(config)


def _vllm_options(config: TrainerConfig) -> dict[str, Any]:
    """What only vLLM has a use for; fields of VllmSettings."""
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


def build_engine(config: TrainerConfig, model: Any, tokenizer: Any, device: torch.device) -> RolloutEngine:
    """The rollout engine over `model`'s own tensors."""
    stops = stop_tokens(model.generation_config, tokenizer)
    return NativeEngine(
        model,
        functools.partial(tokenizer.decode, skip_special_tokens=True),
        eos_token_ids=stops,
        pad_token_id=_pad_token(tokenizer, stops),
        num_slots=config.actor_rollout_ref.rollout.max_num_seqs,
        max_length=_max_length(config),
        device=device,
        **native_options(config),
    )


def stop_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's eos and those of the model's generation config."""
    found = [tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)]
    flat = [t for item in found for t in (item if isinstance(item, list | tuple) else [item])]
    return sorted({int(t) for t in flat if t is not None})


def _generation_config(path: str, trust_remote_code: bool) -> Any:
    """A model's generation config, as the model has it when it is loaded."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(resolve(path))
    except OSError:  # it has no file of its own
        model = AutoConfig.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
        return GenerationConfig.from_model_config(model)


def _pad_token(tokenizer: Any, stops: list[int]) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops[0] if stops else 0)


def _max_length(config: TrainerConfig) -> int:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    prompt = rollout.prompt_length or data.max_prompt_length
    return rollout.max_model_len or prompt + (rollout.response_length or data.max_response_length)


@contextmanager
def current_weights(roles: Roles | RankRoles) -> Iterator[Mapping[str, Tensor]]:
    """The policy's tensors under the plain model's names, adapters merged in, tied ones once."""
    if roles.adapters is not None:
        with roles.adapters.merged() as tensors:
            yield _once(tensors)
    else:
        yield _once(roles.weights())


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the second name of a tensor that has two: the reader's model ties them as ours does."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen or not tensor.numel():
            kept[name] = tensor
        seen.add(place)
    return kept
