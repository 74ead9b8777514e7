"""The `actor_rollout_ref.model` section, and the sharding and optimiser keys of every trained model."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key


class ModelConfig(Section):
    """Which model is trained, and how its forward pass is laid out."""

    path: str = key(
        default="embedded",
        doc="The model to train: `embedded` or `embedded-turns` (both ship with gspo), a folder in Hugging Face format, or a hub name.",
    )
    tokenizer_path: str | None = key(default=None, doc="Folder or hub name of the tokenizer; null = the model's own.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        default="auto", doc="Precision of computation; auto = bfloat16 on a GPU, float32 on a CPU."
    )
    trust_remote_code: bool = key(
        default=False, doc="Run Python code that comes with the model. Nothing else switches this on."
    )
    override_config: dict[str, Any] = key(
        factory=dict,
        doc="Values that replace those of the model's own config before the model is built, for the reference and the "
        "critic too. Checkpoints contain them.",
        example="{rope_theta: 1e6}",
    )
    attn_implementation: Literal["sdpa", "eager", "flex_attention"] | None = key(
        default=None,
        doc="Attention implementation of transformers; null = its own choice. flex_attention applies to training on "
        "packed sequences only.",
    )
    enable_gradient_checkpointing: bool = key(
        default=False,
        doc="Recompute activations in the backward pass: saves memory, costs time. Where it is not set, or auto: on if the "
        "run does not fit into memory without it.",
        auto=True,
    )
    use_remove_padding: bool = key(
        default=True, doc="Train on packed sequences without padding. use_shared_prefix always packs."
    )
    use_shared_prefix: bool = key(
        default=True,
        doc="Compute the prompt of a group once per forward pass in training, instead of once per response.",
    )
    load_in_4bit: bool = key(
        default=False,
        doc="With LoRA: keep the frozen weights of linear layers in 4 bits (NF4 of bitsandbytes, extra quant; one process). "
        "Checkpoints contain the merged model in full precision.",
    )
    lora_rank: int = key(default=0, doc="Rank of LoRA adapters; 0 = train all weights.", ge=0)
    lora_alpha: float = key(default=16.0, doc="Scale of LoRA: updates are multiplied by lora_alpha / lora_rank.", gt=0)
    lora_dropout: float = key(
        default=0.0, doc="Dropout of LoRA. Has no effect: dropout is always off in training.", ge=0, lt=1
    )
    target_modules: str | list[str] = key(
        default="all-linear",
        doc="Modules that get LoRA adapters: all-linear, or a list of names.",
        example="[q_proj, v_proj]",
    )
    exclude_modules: str | list[str] | None = key(
        default=None, doc="Names of modules that get no LoRA adapters; null = none are excluded."
    )


class FSDPConfig(Section):
    """Sharding of a model with strategy=fsdp2. optimizer_offload also works in a single process."""

    param_offload: bool = key(
        default=False, doc="Keep the parameters in host memory while they are not used.", may_change_on_resume=True
    )
    optimizer_offload: bool = key(
        default=False,
        doc="Keep the optimiser's state in host memory while it is not used. In a single process on a GPU, the float32 "
        "master weights too.",
        may_change_on_resume=True,
    )
    offload_policy: bool = key(
        default=False,
        doc="Use FSDP2's own CPU offload of parameters, gradients and optimiser state.",
        may_change_on_resume=True,
    )
    reshard_after_forward: bool = key(
        default=True,
        doc="Free the gathered parameters after the forward pass: less memory, more traffic.",
        may_change_on_resume=True,
    )
    fsdp_size: int = key(
        default=-1, doc="Devices that share one copy of the model; -1 = all.", ge=-1, may_change_on_resume=True
    )


class OptimConfig(Section):
    """AdamW and its learning-rate schedule, which counts training steps."""

    lr: float = key(default=1e-6, doc="Peak learning rate.", ge=0)
    lr_warmup_steps: int = key(
        default=-1, doc="Steps of linear warm-up; -1 = computed from lr_warmup_steps_ratio.", ge=-1, unit="steps"
    )
    lr_warmup_steps_ratio: float = key(default=0.0, doc="Warm-up as a share of the steps of the schedule.", ge=0, le=1)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = key(
        default="constant", doc="Learning rate after the warm-up."
    )
    min_lr_ratio: float = key(
        default=0.0, doc="Schedules cosine and linear: last learning rate as a share of the peak.", ge=0, le=1
    )
    total_training_steps: int = key(
        default=-1, doc="Steps of the schedule; -1 = the steps of the run.", ge=-1, unit="steps"
    )
    weight_decay: float = key(default=0.01, doc="Decoupled weight decay.", ge=0)
    betas: list[float] = key(
        factory=lambda: [0.9, 0.999], doc="AdamW's decay rates of the first and the second moment."
    )
    eps: float = key(default=1e-8, doc="AdamW's epsilon.", gt=0)
    fused: bool = key(default=True, doc="Use torch's fused implementation of AdamW.")
    eight_bit: bool = key(
        default=False,
        doc="Keep AdamW's moments in 8 bits: 2 bytes per parameter instead of 8 (bitsandbytes, extra quant; one process).",
    )
