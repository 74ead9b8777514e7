from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gspo.data
from gspo import hub
from gspo.commands.data import app
from gspo.data.datasets import dataset, load_rows
from gspo.data.rows import DataError, Row, user_message


def test_a_registered_dataset_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo.data import datasets

    monkeypatch.setattr(datasets.DATASETS, "_items", dict(datasets.DATASETS._items))

    @dataset("mine")
    def mine(split: str, *, limit: int | None, seed: int) -> list[Row]:
        return [Row(f"{split}/{seed}/{i}", user_message("x")) for i in range(limit or 3)]

    assert [r.uid for r in load_rows("mine", "val", limit=2, seed=5)] == ["val/5/0", "val/5/1"]
    with pytest.raises(ValueError, match="already registered"):
        dataset("mine")(lambda split, *, limit, seed: [])


@pytest.mark.parametrize(
    ("name", "message"),
    [("arithmetik", "did you mean 'arithmetic'"), ("./nope", "is not a dataset"), ("x.jsonl", "is not a file")],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(name)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(DataError, match="cut to 0 rows"):
        load_rows("arithmetic", limit=0)


def test_hub_names_say_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("gsm8k", "openai/gsm8k", "owner/name"):
        with pytest.raises(DataError, match=r"gspo\[data\]"):
            load_rows(name)


def test_hub_records_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    class Package:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str) -> list[dict]:
            requests.append((name, config, split))
            if split == "dev":
                raise ValueError("Unknown split\nmore")
            return [{"prompt": "x", "ground_truth": 1}, {"prompt": 3, "ground_truth": 1}]

    monkeypatch.setitem(sys.modules, "datasets", Package)  # type: ignore[arg-type]
    monkeypatch.setattr(hub, "why_unreachable", lambda name, kind: "")
    assert load_rows("o/n:c", "val", limit=1)[0].uid == "o/n[test]:1"
    with pytest.raises(DataError, match=r"o/n\[train\]:2: field 'prompt' is 3"):
        load_rows("o/n")
    with pytest.raises(DataError, match=r"o/n\[dev\]: could not be read from the hub \(Unknown split\)"):
        load_rows("o/n", hub_split="dev")
    assert load_rows("o/n", "val", limit=1, hub_split="test[:5]")[0].uid == "o/n[test[:5]]:1"
    assert requests == [("o/n", "c", "test"), ("o/n", None, "train"), ("o/n", None, "dev"), ("o/n", None, "test[:5]")]


def test_a_hub_name_is_refused_at_once_when_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        class config:
            HF_DATASETS_CACHE = "/no/such/folder"

    monkeypatch.setitem(sys.modules, "datasets", Package)  # type: ignore[arg-type]
    monkeypatch.setattr(hub, "why_unreachable", lambda name, kind: "no route to host")
    monkeypatch.setattr(hub, "is_cached", lambda name, kind: False)
    with pytest.raises(DataError, match=r"o/n: is not a local file.*no route to host.*data\.train_files"):
        load_rows("o/n")


def test_show_prints_no_terminal_sequences_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    hostile = "\x1b[2J\x1b]0;owned\x07\r\u202e\x9b1m 日本 é"
    row = {"prompt": hostile, "ground_truth": hostile, "data_source": hostile, "extra_info": {"note": hostile}}
    file.write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(app, ["show", str(file), "--ground-truth-key", "ground_truth"])
    assert result.exit_code == 0, result.output
    assert not set(result.output) & set("\x1b\x07\r\u202e\x9b")
    assert "\\x1b[2J" in result.output and "日本 é" in result.output


def test_show_names_a_model_that_cannot_be_had() -> None:
    result = CliRunner().invoke(app, ["show", "arithmetic", "--limit", "1", "--model", "./no-such-folder/x/y"])
    assert result.exit_code == 2 and "--model ./no-such-folder/x/y" in result.output


def test_show_prints_rows_as_the_model_sees_them() -> None:
    result = CliRunner().invoke(app, ["show", "arithmetic", "--n", "2", "--limit", "10"])
    assert result.exit_code == 0, result.output
    first = load_rows("arithmetic", limit=1)[0]
    assert f"<user>{first.messages[0]['content']}<assistant>" in result.output
    assert f"ground_truth: {first.ground_truth}" in result.output
    assert result.output.count("---") == 2
    assert result.output.startswith("10 rows")


def test_show_ends_with_2_on_broken_data(tmp_path: Path) -> None:
    """The real program: a broken row ends it before a tokenizer or torch is imported."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "x"}) + "\n")
    code = (
        "import sys; sys.argv = ['gspo', 'data', 'show', sys.argv[1]]\n"
        "from gspo.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"{file}:1: field 'reward_model.ground_truth'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_exports_what_a_dataset_of_ones_own_needs() -> None:
    assert (gspo.data.Row, gspo.data.dataset, gspo.data.load_rows) == (Row, dataset, load_rows)
    with pytest.raises(AttributeError, match="nosuchname"):
        gspo.data.nosuchname  # noqa: B018
