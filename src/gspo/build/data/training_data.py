"""What a run trains on: prompts, examples to imitate, or pairs of answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.build.data.given import Inputs
from gspo.build.data.rows import given_datasets, rows_of_split, sft_rows
from gspo.config import TrainerConfig
from gspo.data.chat_template import encode_prompts
from gspo.data.columns import Columns, Say
from gspo.data.examples import Example, encode_examples
from gspo.data.preferences import Preference, as_preferences
from gspo.data.rows import DataError
from gspo.rewards.graders.code import read_tests
from gspo.types import Prompt

SPLIT_NAMES = {"train": "training data", "val": "held-out data"}


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
    dataset whose columns were guessed, and one about rows that are left out because they are too long.
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
        say=None if say is None else lambda note: say(f"{SPLIT_NAMES[split]}: {note}"),
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


@dataclass(frozen=True)
class PromptData:
    """The prompts of a run."""

    train: list[Prompt]
    held_out: list[Prompt]
    num_seen: int  # held-out prompts that are also trained on
    notes: list[str]  # for the user

    def warn(self, notify: Callable[[str], None]) -> None:
        """Say it when training rows are in the evaluation."""
        if self.num_seen:
            notify(
                f"{self.num_seen} of the {len(self.held_out)} evaluation questions are also training rows, so their "
                "accuracy says nothing about new questions; hold rows out, or set data.val_split to a share"
            )

    def held_out_facts(self) -> dict[str, int]:
        return {"questions": len(self.held_out), "also_trained_on": self.num_seen} if self.held_out else {}


def load_prompt_data(
    config: TrainerConfig, tokenizer: Any, inputs: Inputs, template_options: Mapping[str, Any] | None
) -> PromptData:
    """Training prompts and held-out ones, from the caller's rows or the config's files."""
    notes: list[str] = []
    say = functools.cache(notes.append)  # once where both are of the same file
    rows, val_rows = given_datasets(config, prompt_columns(config), inputs.train_dataset, inputs.val_dataset, say)
    train = load_prompts(config, tokenizer, "train", rows, template_options, say)
    held_out = load_prompts(config, tokenizer, "val", val_rows, template_options, say)
    return PromptData(train, held_out, count_seen(train, held_out), notes)


def count_seen(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """How many held-out prompts have the text of a training prompt, whatever their rows are called."""
    seen = {_text_of(prompt) for prompt in train}
    return sum(_text_of(prompt) in seen for prompt in held_out)


def _text_of(prompt: Prompt) -> tuple[str, ...]:
    return tuple(" ".join(str(message.get("content", "")).split()) for message in prompt.messages)
