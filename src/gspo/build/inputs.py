"""What a run trains on: prompts, examples to imitate, or pairs of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gspo.build.data.rows import rows_of_split, sft_rows
from gspo.config import TrainerConfig
from gspo.data.chat_template import encode_prompts
from gspo.data.columns import Columns, Say
from gspo.data.examples import Example, encode_examples
from gspo.data.preferences import Preference, as_preferences
from gspo.data.rows import DataError
from gspo.rewards.graders.code import read_tests
from gspo.types import Prompt


def prompt_columns(config: TrainerConfig) -> Columns:
    """The columns of rows whose answers are generated."""
    c = config.data
    return Columns(c.prompt_key, c.ground_truth_key, c.data_source_key)


def example_columns(config: TrainerConfig) -> Columns:
    """The columns of rows whose answers are imitated. A correct answer is not needed."""
    c = config.data
    return Columns(c.prompt_key, None, c.data_source_key, c.response_key)


def pair_columns(config: TrainerConfig) -> Columns:
    """The columns of rows with two answers, which are `chosen` and `rejected`."""
    c = config.data
    return Columns(c.prompt_key, None, c.data_source_key)


def load_prompts(
    config: TrainerConfig,
    tokenizer: Any,
    split: str,
    given: Iterable[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
    say: Say | None = None,
) -> list[Prompt]:
    """The encoded prompts of a split ("train" or "val"): those the config names, or the rows that are given.

    `template_options` replace those of the config, where an environment adds its tools. `say` gets a sentence for each
    dataset whose columns were guessed.
    """
    c = config.data
    rows = rows_of_split(config, tokenizer, split, prompt_columns(config), given, say)
    if not rows and split == "train":
        raise DataError("data.train_files" if given is None else "train_dataset", "has no rows; expected at least one")
    return encode_prompts(
        rows,
        tokenizer,
        max_prompt_length=c.max_prompt_length,
        truncation=c.truncation,
        filter_overlong_prompts=c.filter_overlong_prompts,
        **(c.apply_chat_template_kwargs if template_options is None else template_options),
    )


def load_examples(
    config: TrainerConfig, tokenizer: Any, split: str, given: Iterable[Any] | None = None, say: Say | None = None
) -> tuple[list[Example], int]:
    """The examples of a split ("train" or "val") and how many rows were left out because they are too long.

    Rows need a text to imitate, but no ground truth.
    """
    c = config.data
    rows = rows_of_split(config, tokenizer, split, example_columns(config), given, say)
    if not rows and split == "train":
        raise DataError("data.train_files" if given is None else "train_dataset", "has no rows; expected at least one")
    examples = encode_examples(
        rows,
        tokenizer,
        max_length=c.max_length,
        truncation=c.truncation,
        filter_overlong=c.filter_overlong_prompts,
        **c.apply_chat_template_kwargs,
    )
    return examples, len(rows) - len(examples)


def load_preferences(
    config: TrainerConfig, tokenizer: Any, split: str, given: Iterable[Any] | None = None, say: Say | None = None
) -> list[Preference]:
    """The preference pairs of a split ("train" or "val"): those the config names, or the rows that are given."""
    rows = rows_of_split(config, tokenizer, split, pair_columns(config), given, say)
    if not rows and split == "train":
        raise DataError("data.train_files" if given is None else "train_dataset", "has no rows; expected at least one")
    return as_preferences(rows)


def load_sft_examples(config: TrainerConfig, tokenizer: Any) -> list[Example]:
    """The examples of `data.sft_files`, imitated beside reinforcement learning. Those that are too long are left out."""
    c = config.data
    return encode_examples(
        sft_rows(config, example_columns(config)),
        tokenizer,
        max_length=c.max_length or c.max_prompt_length + c.max_response_length,
        filter_overlong=True,
        **c.apply_chat_template_kwargs,
    )


def check_code_tests(prompts: Iterable[Prompt]) -> None:
    """Refuse tests that no program could be graded by, naming their row."""
    for prompt in prompts:
        if prompt.data_source == "code":
            try:
                read_tests(prompt.ground_truth)
            except ValueError as error:
                raise DataError(prompt.uid, f"cannot be graded: {error}", field="ground_truth") from None
