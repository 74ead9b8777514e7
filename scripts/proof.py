"""Runs the tables of `scripts/proof_tables.yaml` and keeps one JSON file per run in `docs/results/`.

    python scripts/proof.py run gsm8k-losses --methods gspo,grpo --seeds 0,1,2 --at-once 3 \\
        actor_rollout_ref.model.path=MODEL data.train_files=gsm8k:FOLDER data.val_files=gsm8k:FOLDER
    python scripts/proof.py collect gsm8k-losses gspo 0 RUN_FOLDER

`run` starts `gspo train` once per method and seed, `--at-once` of them side by side, then samples four answers per
held-out question with `gspo eval --n 4` (`--samples 1`: not). A run that has its file already is left out, so that
several occasions add up. The page is made from the files by `scripts/make_results.py`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gspo.rewards.graders.answers import extract_marked
from gspo.runs.metric_names import tool_call_share

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes" / "proof"
RESULTS = ROOT / "docs" / "results"
TRAINED = (
    "critic/score_all/mean",
    "actor/pg_clipfrac_later",
    "response_length/mean",
    "actor/entropy",
    "actor/router_change",
)
"""Metrics of the training steps that a result keeps."""


def read_tables() -> dict[str, Any]:
    """Every table by its name: `question`, `recipe`, `seeds` and `methods`, the settings by method."""
    return OmegaConf.to_container(OmegaConf.load(ROOT / "scripts" / "proof_tables.yaml"))  # type: ignore[return-value]


def recipe_word(recipe: str) -> str:
    """How the command line names a recipe: a file of `recipes/proof`, or the name of a packaged one."""
    return str(RECIPES.relative_to(ROOT) / recipe) if recipe.endswith(".yaml") else recipe


def run_one(table: str, method: str, seed: int, settings: list[str], args: argparse.Namespace) -> None:
    """Train, evaluate and collect one run. What the program prints is in `console.log` of the run's folder."""
    spec, name = read_tables()[table], f"{table}-{method}-seed{seed}"
    folder = args.folder / name
    if result_file(table, method, seed, args.results).exists():
        print(f"{name}: has its result already")
        return
    words = ["train", recipe_word(spec["recipe"]), *spec["methods"][method], *settings]
    words += [f"trainer.seed={seed}", f"trainer.experiment_name={name}", f"trainer.default_local_dir={args.folder}"]
    begin, log = time.time(), args.folder / f"{name}.log"
    if not _program(words, log):
        print(f"{name}: failed; see {log}\n{log.read_text()[-1500:]}", flush=True)
        return
    seconds, samples = time.time() - begin, None
    if args.samples > 1:
        samples = _sampled(folder, settings, args.samples)
    file = collect(table, method, seed, folder, args.results, seconds=seconds, samples=samples, at_once=args.at_once)
    print(f"{name}: {json.loads(file.read_text())['curve'][-1]} in {seconds:.0f} s", flush=True)


def _program(words: list[str], log: Path) -> bool:
    with open(log, "wb") as out:
        command = [sys.executable, "-m", "gspo", *words]
        return subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode == 0


def _sampled(folder: Path, settings: list[str], n: int) -> dict[str, Any] | None:
    """What `gspo eval --n` says of the newest checkpoint; None if it failed."""
    newest = max((folder / "checkpoints").glob("step-*"))
    data = next(word.partition("=")[2] for word in settings if word.startswith("data.val_files="))
    rest = [word for word in settings if word.startswith(("data.max_", "actor_rollout_ref.rollout."))]
    command = [sys.executable, "-m", "gspo", "eval", str(newest), "--data", data, "--n", str(n), "--json", *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-1500:], flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def collect(table: str, method: str, seed: int, folder: Path, results: Path, **facts: Any) -> Path:
    """Write the result of a run folder: its curve, its final answers question by question, and how it was made."""
    environment = json.loads((folder / "environment.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = list(_curve(folder, rows))
    result = {
        "table": table,
        "method": method,
        "seed": seed,
        "command": "gspo " + " ".join(environment["argv"][1:]),
        "commit": os.environ.get("GSPO_COMMIT") or environment["git"],
        "machine": environment["device"] if environment["num_gpus"] else f"{environment['cpu_count']} cores",
        "packages": {name: environment["packages"].get(name) for name in ("torch", "transformers")},
        **facts,
        "curve": [{key: value for key, value in point.items() if key != "right"} for point in curve],
        "right": {"start": curve[0]["right"], "final": curve[-1]["right"]},
        "steps": {name: [_short(row.get(name)) for row in rows if row["step"]] for name in TRAINED if _has(rows, name)},
    }
    file = result_file(table, method, seed, results)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


def _curve(folder: Path, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A point per evaluation: greedy accuracy, well-formed answers, length, and what was spent until then."""
    tokens, seconds = 0.0, 0.0
    for row in rows:
        tokens = row.get("train/total_generated_tokens", tokens)
        seconds += row.get("timing_s/step", 0.0) - row.get("timing_s/testing", 0.0)
        spent = {"step": row["step"], "generated_tokens": int(tokens), "seconds": round(seconds, 1)}
        file = folder / "evals" / f"step-{row['step']:06d}.jsonl.gz"
        if file.exists():
            calls = tool_call_share(row)
            with gzip.open(file, "rt") as lines:
                point = _point([json.loads(line) for line in lines])
            yield spent | point | ({} if calls is None else {"tool_calls": calls})


def _point(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the answers to all held-out questions. An answer without a reward counts as wrong."""
    answers = [record["responses"][0] for record in sorted(records, key=lambda record: record["uid"])]
    return {
        "questions": len(answers),
        "acc": sum(answer["acc"] or 0.0 for answer in answers) / len(answers),
        "well_formed": sum(extract_marked(answer["text"]) is not None for answer in answers) / len(answers),
        "cut": sum(answer["finish_reason"] == "length" for answer in answers) / len(answers),
        "length": sum(answer["num_tokens"] for answer in answers) / len(answers),
        "right": "".join("1" if answer["acc"] else "0" for answer in answers),
    }


def _has(rows: list[dict[str, Any]], name: str) -> bool:
    return any(name in row for row in rows)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def result_file(table: str, method: str, seed: int, results: Path = RESULTS) -> Path:
    return results / table / f"{method}-seed{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the methods and seeds of a table")
    run.add_argument("table", choices=sorted(read_tables()))
    run.add_argument("--methods", help="some of the table's methods, with commas between them; default: all")
    run.add_argument("--seeds", help="seeds, with commas between them; default: the table's")
    run.add_argument("--at-once", type=int, default=1, help="runs side by side")
    run.add_argument("--samples", type=int, default=4, help="sampled answers per question at the end; 1 = none")
    run.add_argument("--folder", type=Path, default=ROOT / "runs" / "proof", help="where the run folders go")
    gather = commands.add_parser("collect", help="write the result of a run folder")
    gather.add_argument("table", choices=sorted(read_tables()))
    gather.add_argument("method")
    gather.add_argument("seed", type=int)
    gather.add_argument("run", type=Path)
    for each in (run, gather):
        each.add_argument("--results", type=Path, default=RESULTS, help="where the results go")
    args, settings = parser.parse_known_args()
    if args.command == "collect":
        print(collect(args.table, args.method, args.seed, args.run, args.results))
        return
    spec = read_tables()[args.table]
    methods = args.methods.split(",") if args.methods else list(spec["methods"])
    seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else spec["seeds"]
    args.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        jobs = [pool.submit(run_one, args.table, method, seed, settings, args) for seed in seeds for method in methods]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
