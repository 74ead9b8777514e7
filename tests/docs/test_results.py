"""docs/results.md is made from the files in docs/results, and those from run folders."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded import preloaded_python

ROOT = Path(__file__).parents[2]
NAMES = [file.stem for file in (ROOT / "src" / "gspo" / "config" / "recipes").glob("*.yaml")]
FILES = sorted((ROOT / "docs" / "results").glob("*/*.json"))


def program(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([preloaded_python(), *words], cwd=cwd, capture_output=True, text=True)


def test_the_page_is_made_from_the_files(tmp_path: Path) -> None:
    for name in ("scripts", "docs", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    made = program("scripts/make_results.py", "--check", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    file = tmp_path / FILES[0].relative_to(ROOT)
    result = json.loads(file.read_text())
    result["curve"][-1]["acc"] += 0.01
    file.write_text(json.dumps(result))
    assert "not made from" in program("scripts/make_results.py", "--check", cwd=tmp_path).stderr


def test_means_over_seeds_have_students_interval(tmp_path: Path) -> None:
    for name in ("scripts", "docs", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.rmtree(tmp_path / "docs" / "results")
    (tmp_path / "docs" / "results.md").write_text("<!-- arithmetic -->\n\n\n\n<!-- /arithmetic -->\n")
    folder = tmp_path / "docs" / "results" / "arithmetic"
    folder.mkdir(parents=True)
    for method, ends in {"gspo": (0.6, 0.7, 0.8), "grpo": (0.5, 0.7, 0.6)}.items():
        for seed, end in enumerate(ends):
            point = {"step": 0, "acc": 0.3, "questions": 100, "length": 5.0, "generated_tokens": 0, "seconds": 0}
            last = {**point, "acc": end, "step": 2, "generated_tokens": 2500}
            facts = {"machine": "2 cores", "packages": {"torch": "2"}, "commit": "abc", "steps": {}}
            result = {"method": method, "seed": seed, "curve": [point, last], **facts}
            (folder / f"{method}-seed{seed}.json").write_text(json.dumps(result))
    made = program("scripts/make_results.py", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "docs" / "results.md").read_text()
    # ± 4.303 · 0.1 / √3 = 0.2484; the differences -0.1, 0.0, -0.2 have the same deviation
    assert "| gspo | 3 | 30.0 % | 70.0 (45.2 to 94.8) | +40.0 (+15.2 to +64.8) | – |" in page
    assert "| grpo | 3 | 30.0 % | 60.0 (35.2 to 84.8) | +30.0 (+5.2 to +54.8) | -10.0 (-34.8 to +14.8) |" in page
    assert "| 2.5 k |" not in page and "| 2 k |" in page


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_result_says_how_it_was_made(file: Path) -> None:
    result = json.loads(file.read_text())
    assert result["command"].startswith(("gspo train recipes/proof/", *(f"gspo train {name} " for name in NAMES)))
    assert f"trainer.seed={result['seed']} " in result["command"]
    assert result["commit"] and result["machine"]
    assert file.stem == f"{result['method']}-seed{result['seed']}"


def test_collect_reads_a_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "evals").mkdir(parents=True)
    facts = {
        "argv": ["gspo", "train", "x.yaml"],
        "git": "abc",
        "device": "cpu",
        "num_gpus": 0,
        "cpu_count": 2,
        "packages": {},
    }
    (run / "environment.json").write_text(json.dumps(facts))
    rows = [
        {"step": 0},
        {
            "step": 1,
            "train/total_generated_tokens": 50,
            "timing_s/step": 5.0,
            "timing_s/testing": 2.0,
            "actor/entropy": 0.5,
        },
        {"step": 2, "train/total_generated_tokens": 90, "timing_s/step": 4.0, "actor/entropy": 0.25},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {
        0: [("no number", None, "length"), ("#### 4", 1.0, "stop")],
        2: [("#### 5", 1.0, "stop"), ("4", 0.0, "stop")],
    }
    for step, texts in answers.items():
        with gzip.open(run / "evals" / f"step-{step:06d}.jsonl.gz", "wt") as out:
            for number, (text, acc, reason) in reversed(list(enumerate(texts))):
                response = {"text": text, "acc": acc, "num_tokens": len(text), "finish_reason": reason}
                out.write(json.dumps({"uid": f"q{number}", "responses": [response]}) + "\n")
    done = program(
        "scripts/proof.py", "collect", "gsm8k-losses", "gspo", "3", str(run), "--results", str(tmp_path / "out")
    )
    result = json.loads(Path(done.stdout.strip()).read_text())
    assert (result["method"], result["seed"], result["commit"], result["machine"]) == ("gspo", 3, "abc", "2 cores")
    assert [(p["step"], p["acc"], p["well_formed"], p["cut"]) for p in result["curve"]] == [
        (0, 0.5, 0.5, 0.5),
        (2, 0.5, 0.5, 0),
    ]
    assert result["curve"][1]["generated_tokens"] == 90 and result["curve"][1]["seconds"] == 7.0
    assert result["right"] == {"start": "01", "final": "10"}
    assert result["steps"] == {"actor/entropy": [0.5, 0.25]}
