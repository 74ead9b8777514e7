"""Columns under their usual names: which ones a dataset uses is read from its first record, and said."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRUTH_COLUMNS = ("ground_truth", "answer")  # tried in every record
ANSWER_COLUMNS = ("answer", "response", "completion", "extra_info.answer", "output", "solution", "target")
PROMPT_COLUMNS = ("messages", "conversations", "conversation", "question", "problem", "query", "instruction", "input")
_GUESSED_TRUTHS = (
    *("ground_truth", "answer", "final_answer", "correct_answer", "expected_answer", "reference_answer"),
    *("solution", "label", "target", "output", "response", "completion"),
)
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what; a dotted name reaches into a nested record.

    `prompt_key`: chat messages, or a text, which becomes the user's message; `input_key`: a text that follows it.
    `ground_truth_key`: the correct answer (`ground_truth` and `answer` are tried next; empty or None means that the
    reward needs none). `answer_key`: the text that `gspo sft` imitates (None: the first of ANSWER_COLUMNS).
    """

    prompt_key: str = "prompt"
    ground_truth_key: str | None = "reward_model.ground_truth"
    data_source_key: str = "data_source"
    answer_key: str | None = None
    input_key: str | None = None

    @property
    def are_named(self) -> bool:
        """Whether the user names the columns of the question or of the answer."""
        truths = (DEFAULT.ground_truth_key, None)
        return self.prompt_key != DEFAULT.prompt_key or self.ground_truth_key not in truths or bool(self.answer_key)


DEFAULT = Columns()


def find_columns(record: Any, columns: Columns) -> tuple[Columns, str]:
    """The columns with those that the record lacks replaced by usual ones, and a sentence about the replacements.

    Only keys that are at their defaults are replaced; the sentence is "" when none is.
    """
    if not isinstance(record, Mapping):
        return columns, ""
    said: list[str] = []
    prompt_key = columns.prompt_key
    if prompt_key == DEFAULT.prompt_key and get(record, prompt_key) is ABSENT:
        prompt_key = _first(record, (prompt_key, *PROMPT_COLUMNS)) or prompt_key
        if prompt_key != columns.prompt_key:
            said.append(f"the question is column {prompt_key!r}")
    input_key = "input" if prompt_key == "instruction" and "input" in record else None
    if input_key:
        said.append("followed by 'input'")
    truth_key = columns.ground_truth_key
    if truth_key and truth_key == DEFAULT.ground_truth_key and not _has_truth(record):
        truth_key = _first({k: v for k, v in record.items() if k != prompt_key}, _GUESSED_TRUTHS) or truth_key
        if truth_key != columns.ground_truth_key:
            said.append(f"the correct answer is column {truth_key!r}")
        elif _ends_in_reply(get(record, prompt_key)):
            said.append("the correct answer is the assistant's last turn")
    found = dataclasses.replace(columns, prompt_key=prompt_key, ground_truth_key=truth_key, input_key=input_key)
    return found, ", ".join(said)


def get(record: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted name; null counts as ABSENT. A column whose own name contains the dots comes first."""
    if record.get(dotted) is not None:
        return record[dotted]
    value: Any = record
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return ABSENT
        value = value[part]
    return value


def _has_truth(record: Mapping[str, Any]) -> bool:
    """Whether the correct answer is where it is looked for in every record."""
    return any(get(record, name) is not ABSENT for name in (DEFAULT.ground_truth_key or "", *TRUTH_COLUMNS))


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The column that has the first of these names, written in any way: `Final Answer` is final_answer."""
    present = [column for column, value in record.items() if value is not None]
    columns = {_plain(column): column for column in present}
    columns |= {column: column for column in present}  # the exact name comes first
    return next((columns[name] for name in names if name in columns), None)


def _plain(column: Any) -> str:
    return "_".join(str(column).lower().replace("-", " ").split())


def _ends_in_reply(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    return isinstance(last, Mapping) and (last.get("role") == "assistant" or last.get("from") == "gpt")
