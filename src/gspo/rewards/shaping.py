"""Small rewards and penalties on a response's form. Each is pure and linear in the response's length."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WORDS = 20_000


def format_reward(response: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 when the response has each tag once, in order, none empty, and only white space around them; else 0."""
    rest = response.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if response.count(opening) != 1 or response.count(closing) != 1 or not rest.startswith(opening):
            return 0.0
        inner, found, rest = rest[len(opening) :].partition(closing)
        if not found or not inner.strip():
            return 0.0
        rest = rest.lstrip()
    return 0.0 if rest else 1.0


def repetition_penalty(response: str, ngram: int = 4) -> float:
    """Minus the share of word n-grams that occurred before: 0 without repetition, close to -1 for a loop."""
    if ngram < 1:
        raise ValueError(f"ngram={ngram}, expected at least 1")
    words = response.split(maxsplit=MAX_WORDS)[:MAX_WORDS]
    grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def length_penalty(length: int, max_length: int, free: int = 0) -> float:
    """0 up to `free` tokens, then linearly down to -1 at `max_length`, and -1 beyond."""
    if not 0 <= free < max_length:
        raise ValueError(f"free={free}, expected at least 0 and less than max_length={max_length}")
    return max(-1.0, min(0.0, (free - length) / (max_length - free)))


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), at most 0.

    0 up to `max_length - buffer` tokens, then linearly down to `-factor` at `max_length`, and `-factor` beyond.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer of {buffer} tokens, expected 1 to max_length={max_length}")
    excess = length - (max_length - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0
