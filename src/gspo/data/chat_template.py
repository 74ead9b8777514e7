"""Rows to token ids: the one place where a chat template is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, get_args

from gspo.data.rows import DataError, Row
from gspo.types import Prompt

Truncation = Literal["error", "left", "right", "middle"]
TRUNCATIONS: tuple[Truncation, ...] = get_args(Truncation)
BATCH = 1024  # rows that are tokenized together


def encode_prompt(row: Row, tokenizer: Any, **apply_chat_template_kwargs: Any) -> Prompt:
    """The row as the model will see it, up to where the answer begins."""
    return next(encode_rows([row], tokenizer, **apply_chat_template_kwargs))


def encode_rows(rows: Iterable[Row], tokenizer: Any, **apply_chat_template_kwargs: Any) -> Iterator[Prompt]:
    """The rows as the model will see them, up to where the answer begins.

    Without a chat template, the prompt is the contents of the messages joined by newlines, with the tokenizer's own
    special tokens (a BOS where the model has one) and nothing else.
    """
    with_template = bool(getattr(tokenizer, "chat_template", None))
    for batch in _batches(rows):
        if with_template:
            texts = [_apply(row, tokenizer, apply_chat_template_kwargs) for row in batch]
            encoded = tokenize(texts, tokenizer, add_special_tokens=False)
        else:
            encoded = tokenize(["\n".join(str(m["content"]) for m in row.messages) for row in batch], tokenizer)
            # Some tokenizers add EOS to every text; before an answer it must not be there.
            eos = getattr(tokenizer, "eos_token_id", None)
            encoded = [ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids for ids in encoded]
        for row, ids in zip(batch, encoded, strict=True):
            if not ids:
                raise DataError(row.uid, "has an empty prompt; expected at least one token", field="prompt")
            yield Prompt(row.uid, row.messages, ids, row.data_source, row.ground_truth, row.extra)


def tokenize(texts: list[str], tokenizer: Any, **options: Any) -> list[tuple[int, ...]]:
    """The token ids of each text. A fast tokenizer gets all of them at once and works on several cores."""
    if getattr(tokenizer, "is_fast", False) and len(texts) > 1:
        found = tokenizer(texts, **options)["input_ids"]
    else:
        found = [tokenizer(text, **options)["input_ids"] for text in texts]
    return [tuple(map(int, ids)) for ids in found]


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, BATCH)):
        yield batch


def _apply(row: Row, tokenizer: Any, kwargs: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    options = {"add_generation_prompt": True, **kwargs, "tokenize": False}
    try:
        return tokenizer.apply_chat_template([dict(m) for m in row.messages], **options)
    except TemplateError as error:
        raise DataError(
            row.uid,
            f"is refused by the model's chat template ({error}); expected messages that the template accepts",
            field="prompt",
        ) from error


def encode_answer(text: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens of an answer as the model should write it: the text, then the end-of-sequence token."""
    return encode_answers([text], tokenizer)[0]


def encode_answers(texts: list[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of each answer, as `encode_answer` gives them."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("tokenizer", "has no eos_token; expected one, without which an answer would never end")
    return [(*ids, int(eos)) for ids in tokenize(texts, tokenizer, add_special_tokens=False)]


def encode_prompts(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    max_prompt_length: int | None = None,
    truncation: Truncation = "error",
    filter_overlong_prompts: bool = False,
    say: Callable[[str], None] | None = None,
    **apply_chat_template_kwargs: Any,
) -> list[Prompt]:
    """Every row as a Prompt of at most `max_prompt_length` tokens; longer ones are dropped, cut, or an error.

    `say` gets a sentence about those that are dropped.
    """
    if truncation not in TRUNCATIONS:
        raise DataError("data.truncation", f"is {truncation!r}; expected one of {', '.join(TRUNCATIONS)}")
    prompts: list[Prompt] = []
    num_dropped = longest = 0
    for prompt in encode_rows(rows, tokenizer, **apply_chat_template_kwargs):
        if max_prompt_length is not None and len(prompt.token_ids) > max_prompt_length:
            if filter_overlong_prompts:
                num_dropped += 1
                longest = max(longest, len(prompt.token_ids))
                continue
            prompt = _shorten(prompt, max_prompt_length, truncation)
        prompts.append(prompt)
    if not prompts and num_dropped:
        raise DataError(
            "data.filter_overlong_prompts",
            f"left no prompt: all {num_dropped} are longer than data.max_prompt_length={max_prompt_length} tokens; to keep "
            f"them all, set data.max_prompt_length={longest}",
        )
    if num_dropped and say is not None:
        total = len(prompts) + num_dropped
        say(
            f"{num_dropped:,} of {total:,} rows are longer than data.max_prompt_length={max_prompt_length} tokens and are "
            f"left out; to keep them, set data.max_prompt_length={longest}"
        )
    return prompts


def _shorten(prompt: Prompt, limit: int, truncation: Truncation) -> Prompt:
    """The prompt cut to `limit` tokens."""
    if truncation == "error":
        size = f"is {len(prompt.token_ids)} tokens"
        raise overlong(prompt.uid, size, f"data.max_prompt_length={limit}", field="prompt")
    return dataclasses.replace(prompt, token_ids=cut(prompt.token_ids, limit, truncation))


def cut(ids: tuple[int, ...], limit: int, truncation: Truncation) -> tuple[int, ...]:
    """The tokens cut to `limit`: `left` drops their beginning, `right` their end, `middle` their middle."""
    head = {"left": 0, "right": limit, "middle": limit // 2}[truncation]
    return ids[:head] + ids[len(ids) - (limit - head) :]


def overlong(uid: str, size: str, limit: str, *, field: str) -> DataError:
    """The error of a row that is longer than its limit and may not be cut."""
    return DataError(
        uid,
        f"{size}; expected at most {limit}. Raise it, set data.filter_overlong_prompts=true, or data.truncation to "
        "left, right or middle",
        field=field,
    )
