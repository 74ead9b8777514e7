"""Examples to imitate: rows with answers as tokens, and the order in which they are trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from gspo.data.chat_template import Truncation, cut, encode_answers, encode_rows, overlong
from gspo.data.rows import DataError, Row
from gspo.seeding import derive_seed, permutation
from gspo.types import Prompt


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer. Only `answer_ids` are trained on."""

    prompt: Prompt
    answer_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.answer_ids)


def encode_examples(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    truncation: Truncation = "error",
    filter_overlong: bool = False,
    **apply_chat_template_kwargs: Any,
) -> list[Example]:
    """Every row as an example of at most `max_length` tokens; longer ones are left out, cut, or an error.

    A cut example without an answer token is left out.
    """
    examples: list[Example] = []
    num_overlong = 0
    rows = list(rows)
    answers = encode_answers([_answer_of(row) for row in rows], tokenizer)
    for prompt, answer in zip(encode_rows(rows, tokenizer, **apply_chat_template_kwargs), answers, strict=True):
        example: Example | None = Example(prompt, answer)
        if max_length is not None and example.num_tokens > max_length:
            num_overlong += 1
            example = None if filter_overlong else _shorten(example, max_length, truncation)
        if example is not None:
            examples.append(example)
    if not examples and num_overlong:
        raise DataError(
            "data.filter_overlong_prompts" if filter_overlong else "data.truncation",
            f"left no example: all {num_overlong} are longer than data.max_length={max_length} tokens; raise the length",
        )
    return examples


def _answer_of(row: Row) -> str:
    if row.answer is None:
        raise DataError(row.uid, "is missing; expected a text to train on", field="answer")
    return row.answer


def _shorten(example: Example, limit: int, truncation: Truncation) -> Example | None:
    """The example cut to `limit` tokens. Without prompt tokens, the first answer token becomes the prompt."""
    if truncation == "error":
        size = f"is {example.num_tokens} tokens with its prompt"
        raise overlong(example.prompt.uid, size, f"data.max_length={limit}", field="answer")
    num_prompt = len(example.prompt.token_ids)
    places = cut(tuple(range(example.num_tokens)), limit, truncation)
    ids = example.prompt.token_ids + example.answer_ids
    kept = tuple(ids[place] for place in places)
    start = max(1, sum(place < num_prompt for place in places))
    if start >= len(kept):
        return None
    return Example(dataclasses.replace(example.prompt, token_ids=kept[:start]), kept[start:])


T = TypeVar("T")


class ExampleOrder(Generic[T]):
    """Which examples, or pairs, each step trains on, as a function of the step.

    Every epoch has each example once, in an order that depends on (seed, epoch) only.
    """

    def __init__(self, examples: Sequence[T], batch_size: int, *, seed: int, shuffle: bool = True) -> None:
        if not examples:
            raise DataError("dataset", "has no examples; expected at least one")
        self.examples, self.batch_size = list(examples), batch_size
        self._seed, self._shuffle = seed, shuffle
        self._epoch: tuple[int, np.ndarray] | None = None  # the latest, and its order

    def batch(self, step: int) -> list[T]:
        """The examples of a step, counted from 0."""
        start = step * self.batch_size
        return [self._at(position) for position in range(start, start + self.batch_size)]

    def _at(self, position: int) -> T:
        epoch, offset = divmod(position, len(self.examples))
        if self._epoch is None or self._epoch[0] != epoch:
            size, seed = len(self.examples), derive_seed(self._seed, "shuffle", epoch)
            self._epoch = epoch, permutation(seed, size) if self._shuffle else np.arange(size)
        return self.examples[int(self._epoch[1][offset])]
