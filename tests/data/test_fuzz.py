"""Any record is a row or an error that names where it is; any file gives rows or such an error."""

from __future__ import annotations

import json
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo.data.columns import Columns, to_row
from gspo.data.files import read_records
from gspo.data.rows import DataError, Row

NAMES = ["prompt", "ground_truth", "answer", "data_source", "reward_model", "extra_info", "a.b", "role", "content", ""]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]) | values, "content": values})
records = values | st.fixed_dictionaries(
    {"prompt": st.text(max_size=5) | st.lists(message | values, max_size=3)}, optional=dict.fromkeys(NAMES[1:6], values)
)


@settings(max_examples=50)
@given(
    records,
    st.sampled_from([None, "", "ground_truth", "reward_model.ground_truth"]),
    st.sampled_from(["prompt", "a.b"]),
)
@example({"prompt": "\ud800", "answer": "1"}, "answer", "prompt")
@example({"prompt": [{"role": "user", "content": "\udfff"}], "answer": 1}, "answer", "prompt")
@example({"prompt": "q", "answer": float("nan")}, "answer", "prompt")
@example({"prompt": "q", "reward_model": [1]}, "reward_model.ground_truth", "prompt")
def test_any_record_is_a_row_or_named(record: object, truth: str | None, prompt: str):
    try:
        row = to_row(record, "file.jsonl:7", Columns(prompt_key=prompt, ground_truth_key=truth))
    except DataError as error:
        assert error.where == "file.jsonl:7" and str(error).startswith("file.jsonl:7: ")
        return
    assert isinstance(row, Row) and row.uid == "file.jsonl:7" and row.data_source
    assert row.messages and all(isinstance(m["content"], str) and isinstance(m["role"], str) for m in row.messages)
    assert row.messages[-1]["role"] != "assistant"
    "".join(m["content"] for m in row.messages).encode()
    assert not isinstance(row.ground_truth, float) or math.isfinite(row.ground_truth)


@settings(max_examples=60)
@given(lines=st.lists(st.binary(max_size=30) | records.map(lambda r: json.dumps(r).encode()), max_size=4))
@example(lines=[b"\xef\xbb\xbf" + b'{"prompt": "q"}'])
@example(lines=[b"[" * 2000])
@example(lines=[b"9" * 5000])
@example(lines=[b'{"a": 1e999}', b'{"a": NaN}'])
def test_any_file_gives_records_or_names_its_line(lines: list[bytes], tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_bytes(b"\n".join(lines))
    seen = []
    try:
        for where, _ in read_records(file):
            seen.append(where)
    except DataError as error:
        assert error.where.startswith(f"{file}:")
        number = int(error.where.rpartition(":")[2])
        assert all(int(where.rpartition(":")[2]) < number for where in seen) or not seen
    else:
        assert seen


@settings(max_examples=30)
@given(data=st.binary(max_size=80))
@example(data=b"PAR1" + b"\x00" * 40 + b"PAR1")
def test_any_bytes_as_parquet_are_refused_by_name(data: bytes, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "rows.parquet"
    file.write_bytes(data)
    try:
        list(read_records(file))
    except DataError as error:
        assert error.where.startswith(str(file))
    else:
        raise AssertionError("these bytes are no parquet file")
