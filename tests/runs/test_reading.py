"""Readers against missing, half-written and hostile files."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from gspo import untrusted
from gspo.runs import reading
from gspo.runs.files import write_json
from gspo.runs.metric_table import MetricTable
from gspo.runs.run import find_runs, is_run, read_run


def test_a_half_written_last_row_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1.5}\n{"step": 2, "a": 2.5}\n{"step": 3, "a"')
    assert list(MetricTable().read(file).rows()) == [{"step": 1, "a": 1.5}, {"step": 2, "a": 2.5}]


def test_rows_of_one_step_are_merged_and_sorted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 2, "a": 1, "b": 2}\n{"step": 1, "a": 9}\nnot json\n[]\n{"step": "x"}\n{"step": 2, "b": 3}\n'
    )
    assert list(MetricTable().read(file).rows()) == [{"step": 1, "a": 9}, {"step": 2, "a": 1, "b": 3}]


def test_nan_becomes_null(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": NaN, "b": -Infinity}\n')
    table = MetricTable().read(file)
    assert (table.steps, table.column("a"), table.column("b")) == ([1], [None], [None])


def test_numbers_no_browser_reads_become_null(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "a": 1e999, "b": [-1E+400, 1e-400, 2.5e100], "c": {"9" * 400}, "d": 1e300}}\n')
    assert reading.parse_line(file.read_bytes(), file) == {
        "step": 1,
        "a": None,
        "b": [None, 0.0, 2.5e100],
        "c": None,
        "d": 1e300,
    }
    assert list(MetricTable().read(file).rows()) == [{"step": 1, "d": 1e300}]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "a": 1e308}\n{"step": 2, "a": 1e308, "b": 1e999}\n')
    text = reading.to_json({"sum": read_run(folder).total("a"), "rows": read_run(folder).rows})
    assert json.loads(text, parse_constant=_refuse)["sum"] is None


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_a_gzip_file_that_expands_too_far_or_is_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.gz"
    whole = gzip.compress(bytes(untrusted.FREE_EXPANSION))
    for data, reason in (
        (gzip.compress(bytes(2 * untrusted.FREE_EXPANSION)), "expands to more than 16 MiB"),
        (whole[:-9], "is cut short"),
    ):
        file.write_bytes(data)
        with pytest.raises(untrusted.Unreadable, match=f"file.gz: {reason}"):
            for _ in untrusted.gzip_chunks(file):
                pass
    file.write_bytes(whole)
    assert sum(map(len, untrusted.gzip_chunks(file))) == untrusted.FREE_EXPANSION


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    file, problems = tmp_path / "step-000001.jsonl.gz", []
    file.write_bytes(gzip.compress(b'{"uid": "a", "responses": []}\n{"uid"\n5\n{"uid": "d", "responses": []}\n'))
    assert [group["uid"] for group in reading.read_groups(file, problems=problems)] == ["a", "d"]
    assert [problem.split(" (")[0] for problem in problems] == ["line 2 is not JSON", "line 3 is not a group"]


def test_step_files_are_in_order_and_no_symlinks(tmp_path: Path) -> None:
    for name in ("step-000010.jsonl.gz", "step-000009.jsonl.gz", "index.jsonl", "step-x.jsonl.gz"):
        (tmp_path / name).touch()
    (tmp_path / "step-000011.jsonl.gz").symlink_to("/etc/passwd")
    assert list(reading.step_files(tmp_path)) == [9, 10]


def test_a_gzip_file_cut_short_gives_its_whole_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"uid": str(i), "responses": [], "noise": os.urandom(40).hex()}) for i in range(500)]
    data = gzip.compress("\n".join(lines).encode())
    file = tmp_path / "step-000001.jsonl.gz"
    file.write_bytes(data[: len(data) // 2])
    groups = reading.read_groups(file)
    assert 100 < len(groups) < 400
    assert [g["uid"] for g in groups] == [str(i) for i in range(len(groups))]


def test_other_line_separators_inside_text_do_not_split_a_record(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0bd"
    record = {"uid": "u", "responses": [{"text": text}]}
    file = tmp_path / "step-000001.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(record, ensure_ascii=False).encode()))
    assert reading.read_groups(file)[0]["responses"][0]["text"] == text


def test_leaving_out_the_lists_of_numbers_changes_nothing_else(tmp_path: Path) -> None:
    tricky = 'he said "log_probs": [1, 2] and "old_log_probs": [ ]]'
    response = {
        "text": tricky,
        "tokens": ['log_probs": [', "]"],
        "log_probs": [-1.5, -2e-7],
        "old_log_probs": [0.0],
        "token_ids": [4, 5],
        "score": 1.0,
    }
    file = tmp_path / "step-000001.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"uid": "u", "responses": [response]}).encode()))
    whole = reading.read_groups(file)
    light = reading.read_groups(file, numbers=False)
    assert whole[0]["responses"][0] == response
    assert light[0]["responses"][0] == {**response, "log_probs": [], "old_log_probs": [], "token_ids": []}


def _settings(folder: Path) -> dict[str, tuple[object, str]]:
    return {leaf["key"]: (leaf["value"], leaf["origin"]) for leaf in reading.read_config(folder)}


def test_settings_and_their_origins_come_from_config_json(tmp_path: Path) -> None:
    records = [
        {"key": "a.b", "value": [1, "#"], "origin": "run.yaml:3"},
        {"key": "a.empty", "value": {}, "origin": "default"},
        {"key": "a.mapping", "value": {"x": {"y": 1}, "z": None}, "origin": "flag --mapping"},
    ]
    (tmp_path / "config.json").write_text(json.dumps(records))
    (tmp_path / "config.yaml").write_text("other: 1  # not read\n")
    assert _settings(tmp_path) == {
        "a.b": ([1, "#"], "run.yaml:3"),
        "a.empty": ({}, "default"),
        "a.mapping.x.y": (1, "flag --mapping"),
        "a.mapping.z": (None, "flag --mapping"),
    }


@pytest.mark.parametrize("text", [None, "", "[", "{}", "[]", "[1]", '[{"key": "a"}]', "5", "null", "[" * 20_000])
def test_without_a_usable_config_json_the_values_come_from_config_yaml(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    (tmp_path / "config.yaml").write_text("a:\n  b: .inf  # a comment\n  c: {}\n  d: {e: 1}\n")
    assert _settings(tmp_path) == {"a.b": ("inf", ""), "a.c": ({}, ""), "a.d.e": (1, "")}


def test_what_the_trainer_records_reads_back(tmp_path: Path) -> None:
    from gspo.config import load

    resolved = load(overrides=["trainer.seed=7", "+custom_reward_function.reward_kwargs.scale=2"])
    write_json(tmp_path / "config.json", resolved.records())
    (tmp_path / "config.yaml").write_text(resolved.to_yaml())
    read = _settings(tmp_path)
    for key in ("trainer.seed", "data.train_files", "actor_rollout_ref.actor.optim.lr", "algorithm.adv_estimator"):
        assert read[key] == (resolved.get(key), resolved.origin(key))
    origin = resolved.origin("custom_reward_function.reward_kwargs")
    assert read["custom_reward_function.reward_kwargs.scale"] == (2, origin) and origin.startswith("override")
    (tmp_path / "config.json").unlink()
    assert _settings(tmp_path) == {key: (value, "") for key, (value, _) in read.items()}


def test_an_empty_or_broken_folder_is_read_without_error(tmp_path: Path) -> None:
    run = read_run(tmp_path / "nowhere")
    assert (run.rows, run.config, run.environment, run.result, run.last_step) == ([], [], None, None, 0)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_bytes(b"\xff\xfe\x00garbage")
    (broken / "config.yaml").write_text("a: [1, 2\nb: }")
    (broken / "result.json").write_text('{"start_acc":')
    (broken / "environment.json").write_text("[]")
    run = read_run(broken)
    assert (run.rows, run.config, run.environment, run.result) == ([], [], None, None)


def test_files_that_no_parser_takes_are_left_out(tmp_path: Path) -> None:
    deep = "[" * 20_000
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "a": ' + deep + "\n")
    (tmp_path / "config.yaml").write_text("day: 2026-02-31\n")
    (tmp_path / "result.json").write_text(deep)
    for holder in ("9" * 30, "²", "9" * 5000):
        (tmp_path / ".lock").write_text(holder)
        run = read_run(tmp_path)
        assert (run.rows, run.config, run.result, run.status) == ([{"step": 1}], [], None, "stopped")


def test_status_follows_the_process_and_the_result(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n')
    (path / ".lock").write_text(str(os.getpid()))
    assert read_run(path).status == "running"
    (path / ".lock").write_text("999999999")
    assert read_run(path).status == "stopped"
    (path / "result.json").write_text('{"steps": 1}')
    assert read_run(path).status == "finished"
    with open(path / "metrics.jsonl", "a") as f:  # resumed for more steps
        f.write('{"step": 2, "a": 1}\n')
    (path / ".lock").write_text(str(os.getpid()))
    assert read_run(path).status == "running"


def test_only_real_run_folders_inside_are_found(tmp_path: Path) -> None:
    outside, runs = tmp_path / "outside", tmp_path / "runs"
    for path in (outside, runs / "good", runs / "empty", runs / ".hidden"):
        path.mkdir(parents=True)
    for path in (outside, runs / "good", runs / ".hidden"):
        (path / "metrics.jsonl").write_text("")
    (runs / "link").symlink_to(outside)
    assert is_run(runs / "link")
    assert [p.name for p in find_runs(runs)] == ["good"]


def test_lists_of_numbers_are_left_out_of_files_as_the_run_writes_them(tmp_path: Path) -> None:
    """orjson writes no space after a colon, json does; both are in use."""
    record = {"responses": [{"text": '"log_probs":[1]', "log_probs": [0.5, 1.5], "old_log_probs": [2.5], "score": 1}]}
    for number, separators in enumerate([(",", ":"), (", ", ": ")]):
        file = tmp_path / f"step-{number:06d}.jsonl.gz"
        file.write_bytes(gzip.compress(json.dumps(record, separators=separators).encode()))
        (found,) = reading.read_groups(file, numbers=False)
        (response,) = found["responses"]
        assert response["log_probs"] == response["old_log_probs"] == []
        assert (response["text"], response["score"]) == ('"log_probs":[1]', 1)


@pytest.mark.parametrize("digits", [299, 308, 310, 900])
@pytest.mark.parametrize("before", [0, 1, 77, 149, 150])
def test_integers_beyond_a_float_become_null_wherever_they_are(digits: int, before: int) -> None:
    text = json.dumps({"a": "x" * before}) [:-1] + ', "n": ' + "9" * digits + "}"  # fmt: skip
    value = reading.parse_json(text, Path("file"))["n"]
    assert (value is None) == (digits > 308)
