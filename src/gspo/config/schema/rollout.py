"""The `actor_rollout_ref.rollout` section: the engine and how tokens are drawn."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key, section


@section
class ValKwargs(Section):
    """How held-out responses are drawn."""

    n: int = key(default=1, doc="Responses a held-out prompt; > 1 gives mean@n, best@n, maj@n.", ge=1)
    do_sample: bool = key(default=False, doc="false is greedy decoding.")
    temperature: float = key(default=1.0, doc="do_sample: temperature.", ge=0)
    top_k: int = key(default=-1, doc="do_sample: draw from the k most likely tokens; <= 0 = all.", ge=-1)
    top_p: float = key(
        default=1.0, doc="do_sample: draw from the smallest set of tokens with this mass.", gt=0, le=1
    )


@section
class RolloutConfig(Section):
    """Generation: engine, group size, sampling, memory, asynchrony."""

    name: str = key(
        default="native",
        built_in=("native", "vllm"),
        doc="Rollout engine: native runs the trainer's own modules; vllm needs the extra of that name; others are "
        "registered names or module:function (docs/extend.md) and run in worker processes.",
    )
    mode: Literal["sync", "async"] = key(
        default="sync",
        doc="async generates while training, bounded by max_head_offpolicyness.",
    )
    n: int = key(default=8, doc="Responses a prompt: the group.", ge=1)
    temperature: float = key(default=1.0, doc="Sampling temperature; training log-probs use the same.", gt=0)
    top_k: int = key(default=-1, doc="Draw from the k most likely tokens; <= 0 = all.", ge=-1)
    top_p: float = key(default=1.0, doc="Draw from the smallest set of tokens with this mass.", gt=0, le=1)
    prompt_length: int | None = key(
        default=None,
        doc="Longest prompt the engine takes; null = data.max_prompt_length.",
        gt=0,
        unit="tokens",
    )
    response_length: int | None = key(
        default=None, doc="Longest response it gives; null = data.max_response_length.", gt=0, unit="tokens"
    )
    ignore_eos: bool = key(
        default=False, doc="Generate to the full length whatever the model says: for measurements."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        default="auto",
        doc="Precision of the engine; auto = the model's.",
    )
    max_num_seqs: int = key(default=1024, doc="Responses generated at once (slots).", gt=0)
    max_num_batched_tokens: int = key(default=8192, doc="Tokens of one prefill.", gt=0, unit="tokens")
    max_model_len: int | None = key(
        default=None, doc="Longest prompt + response; null = the sum of both.", gt=0, unit="tokens"
    )
    gpu_memory_utilization: float = key(
        default=0.5, doc="Share of the GPU's memory for the engine's cache.", gt=0, le=1
    )
    tensor_model_parallel_size: int = key(default=1, doc="vllm: devices that share one engine.", ge=1)
    enforce_eager: bool = key(
        default=False,
        doc="No compilation and no CUDA graphs. Without it a CPU too compiles the layers of float32 models of 4 "
        "million parameters or more, where there is a C++ compiler (CXX, else g++).",
    )
    enable_chunked_prefill: bool = key(default=True, doc="vllm: mix prefill and decoding.")
    enable_prefix_caching: bool = key(default=True, doc="vllm: keep the cache of shared prefixes.")
    free_cache_engine: bool = key(default=True, doc="Give the cache's memory back while training.")
    engine_kwargs: dict[str, Any] = key(factory=dict, doc="vllm: further arguments of its engine.")
    max_head_offpolicyness: int = key(
        default=0,
        doc="async: how many versions rollouts may run ahead of training (η); 0 is sync.",
        ge=0,
        unit="steps",
    )
    max_concurrent_rollouts: int | None = key(
        default=None,
        doc="async: groups in flight; null = what the workers' slots hold.",
        gt=0,
        may_change_on_resume=True,
    )
    num_workers: int = key(
        default=1,
        doc="Engines. One, native and sync: in the trainer's own process; else each in a process of its own.",
        ge=1,
        may_change_on_resume=True,
    )
    worker_timeout: float = key(
        default=300.0,
        doc="A rollout worker that does not answer for so long is ended and replaced.",
        gt=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    calculate_log_probs: bool = key(
        default=True,
        doc="Use μ, which comes with each token: for the decoupled loss and the actor/rollout_* metrics.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        default=None,
        doc="Responses a forward when π_old is recomputed; null = as in training (exact ratio).",
        gt=0,
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        default=None, doc="π_old by token budget; null = actor.use_dynamic_bsz."
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        default=None,
        doc="Token budget when π_old is recomputed; null = as in training (exact ratio).",
        gt=0,
        unit="tokens",
    )
    val_kwargs: ValKwargs = key(factory=ValKwargs, doc="How held-out responses are drawn.")
