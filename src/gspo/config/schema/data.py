"""The `data` section: where prompts come from and how many make a batch."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key


class CustomDatasetConfig(Section):
    """A dataset class of your own, in place of reading the files."""

    path: str | None = key(default=None, doc="Python file or importable module with the class; null = files are read.")
    name: str | None = key(
        default=None,
        doc="Name of the class. It is called as cls(data_files=…, tokenizer=…, config=…, processor=None), as verl calls "
        "it; each of its items is a row.",
    )


class DataConfig(Section):
    """Prompts: sources, columns, lengths, batch sizes. Sizes count prompts, not responses."""

    train_files: str | list[str] = key(
        default="arithmetic",
        doc="Training data: a built-in task (arithmetic, math, reasoning, code, mixed, gsm8k, reasoning_gym:NAME), a "
        "jsonl, json, csv, tsv or parquet file, a pattern of files such as data/*.jsonl, a folder of save_to_disk, or a "
        "dataset on the Hugging Face hub. The entries of a list are concatenated.",
    )
    val_files: str | list[str] | None = key(
        default=None,
        doc="Held-out data, named as in train_files; null = the held-out part of each task or hub dataset in "
        "train_files. Files have no held-out part; val_split can hold out a share of them.",
    )
    sft_files: str | list[str] | None = key(
        default=None,
        doc="Rows with answers to imitate in the same steps as reinforcement learning, named as in train_files; null = "
        "none. Their loss has the weight actor.sft_weight.",
    )
    sft_batch_size: int | None = key(
        default=None, doc="Rows of sft_files per training step; null = train_batch_size.", gt=0, unit="rows"
    )
    num_train_samples: int | None = key(
        default=None, doc="Use only the first N training prompts; null = all.", ge=1, unit="prompts"
    )
    num_val_samples: int | None = key(
        default=None, doc="Use only the first N held-out prompts; null = all.", ge=1, unit="prompts"
    )
    train_split: str = key(default="train", doc="Split of a hub or saved dataset to train on.")
    val_split: float | str = key(
        default="test",
        doc="Split of a hub or saved dataset to evaluate on; or a number: this share of the questions in train_files is "
        "held out, chosen by their text. Not used where val_files is set; built-in tasks keep their own held-out part.",
        gt=0,
        lt=1,
        example="0.05",
    )
    prompt_key: str = key(
        default="prompt",
        doc="Column with the question, as a list of chat messages or as text. Without it, usual names such as messages, "
        "conversations, question or problem are tried. Messages may end in an assistant turn, which is the answer.",
    )
    ground_truth_key: str = key(
        default="reward_model.ground_truth",
        doc="Column with the correct answer; dots reach into nested records. Without it, `ground_truth`, `answer` and "
        "other usual names such as `solution` are tried. '' = the reward function needs none.",
    )
    response_key: str | None = key(
        default=None,
        doc="For gspo sft: column with the text to imitate; null = the assistant's last turn, or `answer`, "
        "`response`, `completion`, `extra_info.answer`, `output`, `solution` or `target`.",
    )
    data_source_key: str = key(
        default="data_source", doc="Column with the name of the task, which selects the built-in reward."
    )
    system_prompt: str | None = key(
        default=None, doc="System message for every prompt that has none; null = do not add one."
    )
    max_prompt_length: int = key(
        default=512,
        doc="Longest prompt. Where it is not set, or auto: 512, or the limit of a recipe, which grows up to 512 with your "
        "own rows.",
        gt=0,
        unit="tokens",
        auto=True,
    )
    max_response_length: int = key(default=512, doc="Longest response.", gt=0, unit="tokens")
    max_length: int | None = key(
        default=None, doc="For gspo sft: longest prompt with its answer; null = no limit.", gt=0, unit="tokens"
    )
    train_batch_size: int = key(
        default=1024,
        doc="Prompts (groups) per training step. Where it is not set, or auto: as many as there are rows, at most 1024 on "
        "a GPU and 32 on a CPU.",
        gt=0,
        unit="prompts",
        auto=True,
    )
    gen_batch_size: int | None = key(
        default=None,
        doc="With dynamic sampling: prompts per generation batch; null = train_batch_size.",
        gt=0,
        unit="prompts",
    )
    val_batch_size: int | None = key(
        default=None, doc="Held-out prompts generated at once; null = all.", gt=0, unit="prompts"
    )
    shuffle: bool = key(
        default=True, doc="Shuffle the training prompts in every epoch. The order depends on the seed only."
    )
    seed: int | None = key(default=None, doc="Seed of the shuffle; null = trainer.seed.", ge=0)
    filter_overlong_prompts: bool = key(
        default=True,
        doc="Leave out prompts longer than max_prompt_length; in gspo sft, examples longer than max_length.",
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        default="error",
        doc="With filter_overlong_prompts=false: stop at a prompt (in gspo sft: an example) that is too long, or drop its "
        "left, right or middle part.",
    )
    custom_cls: CustomDatasetConfig = key(factory=CustomDatasetConfig, doc="Your own dataset class.")
    apply_chat_template_kwargs: dict[str, Any] = key(
        factory=dict, doc="Extra arguments of the tokenizer's chat template.", example="{enable_thinking: false}"
    )
