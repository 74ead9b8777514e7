"""Rows to token ids: the one place where a chat template is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from gspo.data.rows import DataError, Row
from gspo.types import Prompt

Truncation = Literal["error", "left", "right", "middle"]
TRUNCATIONS: tuple[Truncation, ...] = get_args(Truncation)


def encode_prompt(row: Row, tokenizer: Any, **apply_chat_template_kwargs: Any) -> Prompt:
    """The row as the model will see it, up to where the answer begins.

    Without a chat template, the prompt is the contents of the messages joined by newlines, with the tokenizer's own
    special tokens (a BOS where the model has one) and nothing else.
    """
    if getattr(tokenizer, "chat_template", None):
        text = _apply(row, tokenizer, apply_chat_template_kwargs)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        token_ids = tokenizer("\n".join(str(m["content"]) for m in row.messages))["input_ids"]
        eos = getattr(tokenizer, "eos_token_id", None)
        # Some tokenizers add EOS to every text; before an answer it must not be there.
        if len(token_ids) > 1 and token_ids[-1] == eos:
            token_ids = token_ids[:-1]
    if not token_ids:
        raise DataError(row.uid, "has an empty prompt; expected at least one token", field="prompt")
    return Prompt(row.uid, row.messages, tuple(map(int, token_ids)), row.data_source, row.ground_truth, row.extra)


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
    token_ids = tuple(int(t) for t in tokenizer(text, add_special_tokens=False)["input_ids"])
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("tokenizer", "has no eos_token; expected one, without which an answer would never end")
    return (*token_ids, int(eos))


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
    for row in rows:
        prompt = encode_prompt(row, tokenizer, **apply_chat_template_kwargs)
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
