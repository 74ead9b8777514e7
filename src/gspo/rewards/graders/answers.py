r"""The final answer of a response: `####`, `\boxed{…}`, "answer is", or the last number. Linear in the length.

The last marked answer counts. `\boxed` and `####` have equal rank, "the answer is" a lower one, and a bare number
counts only when nothing is marked. So a response gains nothing by giving several answers.
"""

from __future__ import annotations

import re
from collections import deque

MAX_TAIL = 100_000
"""Only this many characters at the end of a response are read."""

MAX_ANSWER = 2_000
"""An answer longer than this is not an answer."""

NUMBER = re.compile(r"[-+]?[$€£]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?%?", re.ASCII)
_TOKEN = re.compile(r"\\(?:boxed|fbox)[ \t\n]*\{|\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"\\boxed[ \t]+([^\s${}]+)")
_PHRASE = re.compile(r"answer(?:[ \t]+is|[ \t]*[:=])[ \t]*:?", re.IGNORECASE)


def extract_answer(response: str) -> str | None:
    """The text of the final answer, or None when there is none."""
    tail = response[-MAX_TAIL:]
    for position, answer in (_last_marked(tail), _after_phrase(tail), _last_number(tail)):
        if position >= 0 and answer.strip():
            return answer.strip() if len(answer) <= MAX_ANSWER else None
    return None


def extract_marked(text: str) -> str | None:
    r"""The text in the last `\boxed{}` or after the last `####`, or None."""
    return _last_marked(text[-MAX_TAIL:])[1].strip() or None


def _last_marked(text: str) -> tuple[int, str]:
    return max(_boxed(text), _after_hashes(text), key=lambda found: found[0])


def _boxed(text: str) -> tuple[int, str]:
    r"""The outermost `\boxed{…}` that closes last, by one pass over the braces; (-1, "") when none closes."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return -1, ""
    opened: list[int] = []  # for each open brace, where its content begins; -1 for braces that are not of a box
    found = (-1, "")
    for token in _TOKEN.finditer(text):
        if token.group() == "}":
            start = opened.pop() if opened else -1
            if start >= 0:
                found = (token.start(), text[start : token.start()])
        elif token.group() == "{":
            opened.append(-1)
        elif token.group().endswith("{") and len(token.group()) > 2:
            opened.append(token.end())
    last = _last_match(_UNBRACED, text, max(found[0], 0))
    return (last.start(), last.group(1)) if last else found


def _after_hashes(text: str) -> tuple[int, str]:
    """The line after the last `####`."""
    position = text.rfind("####")
    return (position, text[position + 4 :].lstrip("#").strip().split("\n", 1)[0]) if position >= 0 else (-1, "")


def _after_phrase(text: str) -> tuple[int, str]:
    """The text after the last "answer is" or "answer:" on its line, up to the end of the sentence, without asterisks."""
    last = _last_match(_PHRASE, text)
    if last is None:
        return -1, ""
    line = text[last.end() :].lstrip().split("\n", 1)[0]
    line = re.split(r"\.(?:\s|$)", line, maxsplit=1)[0]
    return last.start(), line.strip().strip("*").strip()


def _last_number(text: str) -> tuple[int, str]:
    last = _last_match(NUMBER, text)
    return (last.start(), last.group().rstrip(",")) if last else (-1, "")


def _last_match(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text, start), maxlen=1)), None)
