"""`gsm8k`: grade-school word problems (Cobbe et al., arXiv 2110.14168), from the hub or from files of its format.

A record has `question` and `answer`; the number after the answer's last `####` is the ground truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from gspo.data.files import SUFFIXES, read_records
from gspo.data.hub_records import hub_records
from gspo.data.rows import DataError, Row, user_message
from gspo.paths import user_path

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Think step by step, then write the final number on the last line after ####."


def is_gsm8k(record: Any) -> bool:
    """Whether a record is in GSM8K's own format: a question, and an answer with `####` before its result."""
    return isinstance(record, Mapping) and "prompt" not in record and "question" in record and _is_marked(record)


def to_gsm8k_row(record: Any, where: str) -> Row:
    """A record of GSM8K's format as a Row; a DataError names the field that cannot be used."""
    if not isinstance(record, Mapping):
        raise DataError(where, f"is a {type(record).__name__}; expected an object with question and answer")
    for name in ("question", "answer"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise DataError(where, "is missing or not a text; expected GSM8K's format", field=name)
    truth = record["answer"].rpartition("####")[2].strip().replace(",", "")
    if "####" not in record["answer"] or not _is_number(truth):
        raise DataError(
            where,
            f"ends in {record['answer'][-30:]!r}; expected `#### number` "
            "(for another format, name its columns with data.prompt_key and data.ground_truth_key)",
            field="answer",
        )
    return Row(
        uid=where,
        messages=user_message(f"{record['question'].strip()}\n{INSTRUCTION}"),
        data_source="gsm8k",
        ground_truth=truth,
        answer=record["answer"],
        extra={"question": record["question"]},
    )


def load_gsm8k(split: str = "train", *, limit: int | None = None, seed: int = 0, path: str | None = None) -> list[Row]:
    """GSM8K from `path` (a file, or a folder with train and test files), else from the hub. `val` is its test split.

    `seed` changes nothing: the published order is kept.
    """
    name = "train" if split == "train" else "test"
    records = hub_records(HUB_NAME, name, config="main") if path is None else read_records(_file(path, name))
    return [to_gsm8k_row(record, where) for where, record in itertools.islice(records, limit)]


def _file(path: str, name: str) -> str:
    folder = user_path(path)
    if not folder.is_dir():
        return path
    for suffix in SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return str(folder / f"{name}{suffix}")
    raise DataError(path, f"has no {name}.jsonl or {name}.parquet; expected GSM8K's files in that folder")


def _is_marked(record: Mapping[str, Any]) -> bool:
    answer = record.get("answer")
    return isinstance(answer, str) and "####" in answer


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-").replace(".", "", 1)
    return digits.isascii() and digits.isdigit()
