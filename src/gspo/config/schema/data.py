"""The `data` section: where prompts come from and how many make a batch."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key, section


@section
class DataConfig(Section):
    """Prompts: sources, columns, lengths, batch sizes. Sizes count prompts, not responses."""

    train_files: str | list[str] = key(
        default="arithmetic",
        doc="Built-in task (arithmetic, math, code, mixed, gsm8k, reasoning_gym:NAME), file (jsonl, parquet) or hub name; "
        "a list concatenates.",
    )
    val_files: str | list[str] | None = key(
        default=None,
        doc="Held-out data, as train_files; null = the built-in task's own held-out split, or none for files.",
    )
    num_train_samples: int | None = key(
        default=None, doc="Use only the first so many training prompts; null = all.", ge=1
    )
    num_val_samples: int | None = key(
        default=None, doc="Use only the first so many held-out prompts; null = all.", ge=1
    )
    train_split: str = key(default="train", doc="Split of a hub dataset to train on.")
    val_split: str = key(default="test", doc="Split of a hub dataset to evaluate on.")
    prompt_key: str = key(default="prompt", doc="Column with the question: a list of chat messages, or text.")
    ground_truth_key: str = key(
        default="reward_model.ground_truth",
        doc="Column (dotted when nested) with the right answer; `answer` is tried next.",
    )
    data_source_key: str = key(
        default="data_source", doc="Column with the name of the task, which chooses the reward function."
    )
    system_prompt: str | None = key(default=None, doc="System message put before every prompt that has none.")
    max_prompt_length: int = key(default=512, doc="Longest prompt.", gt=0, unit="tokens")
    max_response_length: int = key(default=512, doc="Longest response.", gt=0, unit="tokens")
    train_batch_size: int = key(
        default=1024, doc="Prompts (groups) trained on in a step.", gt=0, unit="prompts"
    )
    gen_batch_size: int | None = key(
        default=None,
        doc="Prompts a generation batch; null = train_batch_size. Acts with dynamic sampling.",
        gt=0,
        unit="prompts",
    )
    val_batch_size: int | None = key(
        default=None, doc="Held-out prompts generated at once; null = all.", gt=0, unit="prompts"
    )
    shuffle: bool = key(
        default=True, doc="Shuffle the training prompts anew every epoch, as a function of the seed."
    )
    seed: int | None = key(default=None, doc="Seed of the shuffle; null = trainer.seed.", ge=0)
    filter_overlong_prompts: bool = key(
        default=True, doc="Leave out prompts above max_prompt_length, and count them."
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        default="error",
        doc="What to do with a prompt above max_prompt_length that is not left out.",
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        factory=dict, doc="Extra arguments of the tokenizer's chat template, e.g. {enable_thinking: false}."
    )
