"""The `actor_rollout_ref.rollout` section: the engine and how it samples tokens."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.environment import MultiTurnConfig
from gspo.config.schema.fields import Section, key


class ValKwargs(Section):
    """How responses to held-out prompts are generated."""

    n: int = key(
        default=1,
        doc="Responses per held-out prompt; more than 1 also gives mean@n, best@n and maj@n.",
        ge=1,
        unit="responses",
    )
    do_sample: bool = key(default=False, doc="Sample tokens at random; false = greedy decoding.")
    temperature: float = key(default=1.0, doc="With do_sample: sampling temperature.", ge=0)
    top_k: int = key(default=-1, doc="With do_sample: sample from the k most likely tokens; 0 or less = all.", ge=-1)
    top_p: float = key(
        default=1.0,
        doc="With do_sample: sample from the most likely tokens that together have this probability.",
        gt=0,
        le=1,
    )


class RolloutConfig(Section):
    """Generation: engine, group size, sampling, memory, asynchronous rollouts."""

    name: str = key(
        default="native",
        built_in=("native", "vllm"),
        doc="Engine: native generates with the trainer's own model code; vllm needs the extra gspo[vllm]. Engines of "
        "your own, a registered name or module:function, run in worker processes.",
    )
    mode: Literal["sync", "async"] = key(
        default="sync",
        doc="sync generates and trains in turn; async generates while training, at most max_head_offpolicyness "
        "versions ahead.",
    )
    n: int = key(default=8, doc="Responses per prompt (the group size).", ge=1, unit="responses")
    temperature: float = key(default=1.0, doc="Sampling temperature. Log-probs in training use the same.", gt=0)
    top_k: int = key(default=-1, doc="Sample from the k most likely tokens; 0 or less = all.", ge=-1)
    top_p: float = key(
        default=1.0, doc="Sample from the most likely tokens that together have this probability.", gt=0, le=1
    )
    prompt_length: int | None = key(
        default=None,
        doc="Longest prompt of the engine. If set, it must equal data.max_prompt_length.",
        gt=0,
        unit="tokens",
    )
    response_length: int | None = key(
        default=None,
        doc="Longest response of the engine. If set, it must equal data.max_response_length.",
        gt=0,
        unit="tokens",
    )
    ignore_eos: bool = key(default=False, doc="Generate every response to its full length. For benchmarks only.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        default="auto", doc="Precision of rollout workers; auto = that of training."
    )
    max_num_seqs: int = key(
        default=1024,
        doc="Responses that an engine generates at once. Where it is not set, or auto: halved until the run fits into "
        "memory.",
        gt=0,
        unit="responses",
        auto=True,
    )
    max_num_batched_tokens: int = key(
        default=8192,
        doc="Most prompt tokens that the native engine processes at once; with vllm, most tokens per engine step. Where it "
        "is not set, or auto: halved until the run fits into memory.",
        gt=0,
        unit="tokens",
        auto=True,
    )
    max_model_len: int | None = key(
        default=None,
        doc="Longest prompt with its response; null = the sum of the two longest lengths.",
        gt=0,
        unit="tokens",
    )
    gpu_memory_utilization: float = key(
        default=0.5,
        doc="Share of the GPU's memory for the KV cache of the native engine, or for the whole engine of vllm.",
        gt=0,
        le=1,
    )
    tensor_model_parallel_size: int = key(default=1, doc="With vllm: devices that share one engine.", ge=1)
    enforce_eager: bool = key(
        default=False,
        doc="Switch compilation and CUDA graphs off. Otherwise the engine compiles its layers on a CPU too, for "
        "float32 models of 4 million parameters or more where there is a C++ compiler (CXX, else g++).",
    )
    enable_chunked_prefill: bool = key(
        default=True, doc="With vllm: process prompts and generate tokens in the same batch."
    )
    enable_prefix_caching: bool = key(default=True, doc="With vllm: reuse the KV cache of shared prefixes.")
    free_cache_engine: bool = key(
        default=True, doc="Release the memory of the KV cache during training. Asynchronous engines keep it."
    )
    keep_cache: bool = key(
        default=False,
        doc="Native engine: responses in generation keep their KV cache when the weights change, instead of computing it "
        "again. Faster with long answers; later tokens then attend to keys and values of older weights. Writing a "
        "checkpoint still computes them again, so that a resumed run continues to the same bits.",
    )
    engine_kwargs: dict[str, Any] = key(
        factory=dict,
        doc="Further arguments of the engine: of vLLM's EngineArgs, or the `options` of an engine of your own. The "
        "native engine has none.",
        example="{block_size: 32}",
    )
    max_head_offpolicyness: int = key(
        default=0,
        doc="With mode=async: how many weight versions (training steps) rollouts may run ahead of training (η); 0 = "
        "like sync.",
        ge=0,
        unit="steps",
    )
    max_concurrent_rollouts: int | None = key(
        default=None,
        doc="With mode=async: most groups in generation at once; null = as many as the workers generate at once.",
        gt=0,
        unit="groups",
        may_change_on_resume=True,
    )
    num_workers: int = key(
        default=1,
        doc="Number of engines. A single native engine in sync mode runs inside the trainer; otherwise each engine has "
        "its own process.",
        ge=1,
        may_change_on_resume=True,
    )
    worker_timeout: float = key(
        default=300.0,
        doc="A rollout worker that does not answer for this long is ended and replaced.",
        gt=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    calculate_log_probs: bool = key(
        default=True,
        doc="Use the engine's log-probs (μ) of each token, for the decoupled loss and the metrics actor/rollout_*.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        default=None,
        doc="Responses per forward pass when π_old is recomputed; null = as in training, which makes the ratio exact.",
        gt=0,
        unit="responses",
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        default=None,
        doc="Fill forward passes by tokens when π_old is recomputed; null = decided by which of the two sizes is set, "
        "else as in training.",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        default=None,
        doc="Most tokens per forward pass when π_old is recomputed; null = as in training, which makes the ratio "
        "exact.",
        gt=0,
        unit="tokens",
    )
    val_kwargs: ValKwargs = key(factory=ValKwargs, doc="How responses to held-out prompts are generated.")
    multi_turn: MultiTurnConfig = key(factory=MultiTurnConfig, doc="Conversations with tools and environments.")
