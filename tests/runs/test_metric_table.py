"""The metric table: what it holds is what the lines of the file say, however they come and whatever they hold."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from gspo.runs import metric_table
from gspo.runs.metric_table import MetricTable


def merged(lines: list[str]) -> list[dict[str, Any]]:
    """The rows of these lines, by the plainest way to say it."""
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        step = row.pop("step", None) if isinstance(row, dict) else None
        if type(step) is not int or not 0 <= step < 1 << 53:
            continue
        kept = rows.setdefault(step, {})
        for name, value in row.items():
            kept.pop(name, None)
            if type(value) in (int, float) and abs(value) < 1e308 and not math.isnan(value):
                kept[name] = value
    return [{"step": step, **rows[step]} for step in sorted(rows)]


ODD = [
    *('{"step": NaN, "a": 1}', '{"step": 1e999, "a": 1}', '{"step": 7.0, "a": 1}', '{"step": -1, "a": 1}'),
    *('{"step": "7", "a": 1}', '{"step": true, "a": 1}', '{"step": 9007199254740992, "a": 1}', '{"a": 1}', "[1]", "{}"),
    *('{"step": 7, "a": null}', '{"step": 7, "a": NaN}', '{"step": 7, "a": 1e999}', '{"step": 7, "a": "1"}'),
    *('{"step": 7, "a": true}', '{"step": 7, "a": [1]}', "nonsense", "", '{"step":8,"a":2}', '{"a": 3, "step": 8}'),
    *('{"step": 7, "a, b": 4}', '{"step": 8, "a, b": 4}', f'{{"step": {"9" * 5000}, "a": 1}}', '{"step": 8, "ä": 1}'),
    *('{"step": 0, "a": 1}', '{"step": 3, "a": 1}', '{"step": 3, "b": 1}'),
]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_line_between_plain_ones_is_read_or_left_out_as_json_says(tmp_path: Path, odd: str) -> None:
    plain = [f'{{"step": {step}, "a": {step}.5}}' for step in (1, 3, 4, 5)]
    for lines in ([*plain[:2], odd, *plain[2:]], [odd, *plain], [*plain, odd, '{"step": 6, "a": 0.25}']):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        assert list(MetricTable().read(path).rows()) == merged(lines)


def test_rows_of_any_order_and_form_read_in_any_pieces_are_those_of_the_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(60):
        names = ["a", "b/c", "d, e"][: rng.randint(1, 3)]
        lines = []
        for _ in range(rng.randint(1, 25)):
            chosen = names if rng.random() < 0.8 else rng.sample(names, rng.randint(0, len(names)))
            row = {name: rng.choice([None, rng.randint(-5, 5), rng.random()]) for name in chosen}
            step = len(lines) if rng.random() < 0.7 else rng.randint(0, 9)
            lines.append(json.dumps({"step": step, **row}))
        data = "".join(line + "\n" for line in lines).encode()
        path, table = tmp_path / f"{number}.jsonl", MetricTable()
        cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4)))
        for start, end in zip([0, *cuts], [*cuts, len(data)]):
            with path.open("ab") as file:
                file.write(data[start:end])
            table.read(path)
        expected = merged(lines)
        assert list(table.rows()) == expected and len(table) == len(expected)
        assert table.steps == [row["step"] for row in expected] and table.problem is None
        for name in names:
            assert table.column(name) == [row.get(name) for row in expected]
        assert all(math.isnan(v) for v in table.numbers("unknown")) and len(table.numbers("unknown")) == len(expected)
        assert table.num_cells == len(expected) * len(table.names())


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("longer", [True, False])
def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path, in_place: bool, longer: bool) -> None:
    path, table = tmp_path / "metrics.jsonl", MetricTable()
    path.write_text("".join(f'{{"step": {step}, "a": 1}}\n' for step in range(4)))
    assert len(table.read(path)) == 4
    text = "".join(f'{{"step": {step}, "a": 20}}\n' for step in range(9 if longer else 2))
    if in_place:  # the number of the file stays, as it may when a file system gives it again
        path.write_text(text)
    else:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", path)
    assert table.read(path).column("a") == [20.0] * (9 if longer else 2)
    path.unlink()
    assert len(table.read(path)) == 0 and table.names() == []


def test_a_last_line_without_its_end_counts_once_it_can_be_read(tmp_path: Path) -> None:
    path, table = tmp_path / "metrics.jsonl", MetricTable()
    for text, expected in (('{"step": 1, "a"', []), (": 2}", [2.0]), ('\n{"step": 2, "a": 3}\n', [2.0, 3.0])):
        with path.open("a") as file:
            file.write(text)
        assert table.read(path).column("a") == expected


def test_limits_are_kept_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "a": {step}, "b": 1}}\n' for step in range(10)))
    with monkeypatch.context() as limits:
        limits.setattr(metric_table, "MAX_LINES", 4)
        table = MetricTable().read(path)
        assert (table.steps, table.problem) == ([0, 1, 2, 3], "has more than 4 rows; those after step 3 are left out")
    with monkeypatch.context() as limits:
        limits.setattr(metric_table, "MAX_CELLS", 7)
        table = MetricTable().read(path)
        assert table.steps == [0, 1, 2, 3]  # the row that passes the limit is the last
        assert table.problem == "has more than 7 values; those after step 3 are left out"
    with monkeypatch.context() as limits:
        limits.setattr(metric_table, "MAX_NAMES", 1)
        table = MetricTable().read(path)
        assert table.names() == ["a"] and len(table) == 10
        assert table.problem == "has more than 1 metrics; the others are left out"
    name = "x" * 300
    path.write_text(f'{{"step": 0, "{name}": 1, "{name}y": 2}}\n')
    assert MetricTable().read(path).names() == [name]
    path.write_text("x" * (metric_table.MAX_LINE + 1))
    assert "has a line of over 4 MiB" in (MetricTable().read(path).problem or "")
