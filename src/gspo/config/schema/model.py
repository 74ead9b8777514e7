"""The `actor_rollout_ref.model` section and the sharding keys that every trained model has."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key, section


@section
class ModelConfig(Section):
    """Which model is trained, and how its forward is laid out."""

    path: str = key(
        default="embedded", doc="`embedded` (shipped with gspo), a Hugging Face folder, or a hub name."
    )
    tokenizer_path: str | None = key(
        default=None, doc="Tokenizer folder or hub name when it is not the model's own."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        default="auto",
        doc="Compute precision; auto = bfloat16 on a GPU, float32 on a CPU.",
    )
    trust_remote_code: bool = key(
        default=False, doc="Run Python code that comes with the model. Off unless you type it."
    )
    override_config: dict[str, Any] = key(
        factory=dict,
        doc="Values that replace those of the model's own config before it is built, e.g. {rope_theta: 1e6}; for the "
        "reference and the critic too. A checkpoint holds them.",
    )
    attn_implementation: Literal["sdpa", "eager", "flex_attention"] | None = key(
        default=None,
        doc="Attention of transformers: sdpa or eager; flex_attention for packed training alone; null = its choice.",
    )
    enable_gradient_checkpointing: bool = key(
        default=False, doc="Recompute activations in the backward: less memory, more time."
    )
    use_remove_padding: bool = key(default=True, doc="Train on packed sequences without padding.")
    use_shared_prefix: bool = key(
        default=True, doc="Compute the prompt of a group once in training instead of once a response."
    )
    lora_rank: int = key(default=0, doc="Rank of LoRA adapters; 0 trains all weights.", ge=0)
    lora_alpha: float = key(default=16.0, doc="LoRA's scale: updates are multiplied by alpha / rank.", gt=0)
    lora_dropout: float = key(default=0.0, doc="Dropout before LoRA's first matrix.", ge=0, lt=1)
    target_modules: str | list[str] = key(
        default="all-linear", doc="Modules that get adapters: all-linear, or names."
    )
    exclude_modules: str | list[str] | None = key(default=None, doc="Modules that get none, by name.")


@section
class FSDPConfig(Section):
    """Sharding of a trained model (strategy fsdp2); optimizer_offload acts in one process as well."""

    param_offload: bool = key(
        default=False,
        doc="Keep parameters in host memory while they are not used.",
        may_change_on_resume=True,
    )
    optimizer_offload: bool = key(
        default=False,
        doc="Keep the optimiser's state in host memory while it is not used; without fsdp2 masters too, on a GPU.",
        may_change_on_resume=True,
    )
    offload_policy: bool = key(
        default=False,
        doc="FSDP2's own CPU offload of parameters, gradients and optimiser.",
        may_change_on_resume=True,
    )
    reshard_after_forward: bool = key(
        default=True,
        doc="Free gathered parameters after the forward: less memory, more traffic.",
        may_change_on_resume=True,
    )
    fsdp_size: int = key(
        default=-1, doc="Devices in a shard group; -1 = all.", ge=-1, may_change_on_resume=True
    )


@section
class OptimConfig(Section):
    """AdamW and its learning-rate schedule. The schedule counts training steps."""

    lr: float = key(default=1e-6, doc="Peak learning rate.", ge=0)
    lr_warmup_steps: int = key(
        default=-1,
        doc="Training steps of linear warm-up; -1 = by lr_warmup_steps_ratio.",
        ge=-1,
        unit="steps",
    )
    lr_warmup_steps_ratio: float = key(default=0.0, doc="Warm-up as a share of all steps.", ge=0, le=1)
    lr_scheduler_type: Literal["constant", "cosine"] = key(
        default="constant", doc="Schedule after the warm-up."
    )
    min_lr_ratio: float = key(
        default=0.0, doc="cosine: last learning rate as a share of the peak.", ge=0, le=1
    )
    total_training_steps: int = key(
        default=-1, doc="Steps the schedule spans; -1 = the run's own.", ge=-1, unit="steps"
    )
    weight_decay: float = key(default=0.01, doc="Decoupled weight decay.", ge=0)
    betas: list[float] = key(
        factory=lambda: [0.9, 0.999], doc="AdamW's decay of the first and second moment."
    )
    eps: float = key(default=1e-8, doc="AdamW's epsilon.", gt=0)
    fused: bool = key(default=True, doc="Use the fused optimiser where the device has one.")
