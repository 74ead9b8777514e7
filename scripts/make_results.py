"""Write the tables of docs/results.md and its pictures from the files in docs/results.

    python scripts/make_results.py [--check]

With `--check` nothing is written and the exit code is 1 when a table differs from the page. The pictures need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from page_parts import replaced, table

from gspo.evaluation.evaluator import wilson
from gspo.runs.stats import paired_difference

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS, PICTURES = ROOT / "docs" / "results.md", ROOT / "docs" / "results", ROOT / "docs" / "pictures"
COLOURS = ("#2f6bd8", "#d9630a", "#178a5c", "#b8389a", "#6a50c7", "#0c8599", "#a3600d", "#6b7280")
Results = dict[str, list[dict[str, Any]]]
"""The results of a table, by method, in the order of their seeds."""


def read_results(name: str, methods: Sequence[str]) -> Results:
    found: Results = defaultdict(list)
    for file in sorted((RESULTS / name).glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found[result["method"]].append(result | {"file": file.relative_to(PAGE.parent).as_posix()})
    return {method: found[method] for method in methods if method in found}


def show(results: Results) -> str:
    """A row per run, and the differences of every run from the start and from the first method with the same seed."""
    runs = [run for members in results.values() for run in members]
    return "\n\n".join(part for part in (_runs(runs), _differences(results), _commands(runs)) if part)


def _runs(runs: list[dict[str, Any]]) -> str:
    head = ["run", "steps", "greedy, start", "greedy, end (95 %)", "avg@4", "well-formed", "tokens per answer", "clipped", "generated", "time"]  # fmt: skip
    rows = []
    for run in runs:
        first, last = run["curve"][0], run["curve"][-1]
        clipped = [share for share in run["steps"].get("actor/pg_clipfrac_later", []) if share is not None]
        sampled = (run.get("samples") or {}).get("sampled", {}).get("accuracy")
        rows.append([
            f"[{run['method']}, seed {run['seed']}]({run['file']})", f"{last['step']}", _percent(first["acc"]),
            f"{_percent(last['acc'])} ({_interval(last)})", "–" if sampled is None else _percent(sampled), _formed(first, last),
            f"{first['length']:.0f} → {last['length']:.0f}", _percent(statistics.fmean(clipped)) if clipped else "–",
            f"{last['generated_tokens'] / 1e6:.1f} M", f"{last['seconds']:.0f} s",
        ])  # fmt: skip
    return table(head, rows)


def _differences(results: Results) -> str:
    """Paired over the same questions: end against start, and each method against the first one at the same seed."""
    firsts = {run["seed"]: run for run in next(iter(results.values()), [])}
    rows = []
    for members in results.values():
        for run in members:
            if "right" not in run:
                continue
            pairs = [("its start", run["right"]["start"])]
            first = firsts.get(run["seed"], {})
            if first.get("method") != run["method"] and "right" in first:
                pairs.append((first["method"], first["right"]["final"]))
            for name, right in pairs:
                found = paired_difference([float(bit) for bit in right], [float(bit) for bit in run["right"]["final"]])
                if found is not None:
                    points = f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
                    rows.append(
                        [
                            f"{run['method']}, seed {run['seed']}",
                            name,
                            points,
                            f"{found.num_better} / {found.num_worse}",
                        ]
                    )
    head = ["run", "compared with", "difference in points (95 %, paired)", "questions won / lost"]
    return table(head, rows) if rows else ""


def _commands(runs: list[dict[str, Any]]) -> str:
    facts = {(run["machine"], run["packages"]["torch"], run["commit"][:7], run.get("at_once") or 1) for run in runs}
    lines = [
        f"{machine}, torch {torch}, commit {commit}, {'one run at a time' if at_once == 1 else f'{at_once} runs side by side'}"
        for machine, torch, commit, at_once in sorted(facts)
    ]
    return "Machine: " + "; ".join(lines) + ". The command of each run is in its file."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(point: dict[str, Any]) -> str:
    low, high = wilson(point["acc"], point["questions"]) or (0.0, 1.0)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def _formed(first: dict[str, Any], last: dict[str, Any]) -> str:
    if "well_formed" not in last:
        return "–"
    return f"{_percent(first['well_formed'])} → {_percent(last['well_formed'])}"


def draw(results: Results, path: Path) -> None:
    """Greedy accuracy on the held-out questions over generated tokens, a line per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), dpi=120)
    ax = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.15, top=0.95)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#eceff3", linewidth=0.8)
    for colour, (method, members) in zip(COLOURS, results.items()):
        for number, run in enumerate(members):
            points = [(point["generated_tokens"] / 1e6, 100 * point["acc"]) for point in run["curve"]]
            ax.plot(*zip(*points), marker="o", markersize=4, color=colour, label=None if number else method)
    ax.set_xlabel("generated tokens, millions", fontsize=9)
    ax.set_ylabel("greedy accuracy, %", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    FigureCanvasAgg(figure).print_png(str(path), pil_kwargs={"compress_level": 9})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page differs")
    args = parser.parse_args()
    tables: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "scripts" / "proof_tables.yaml"))
    found = {name: read_results(name, list(spec["methods"])) for name, spec in tables.items()}
    found = {name: results for name, results in found.items() if results}
    text = replaced(PAGE, {name: show(results) for name, results in found.items()})
    if args.check:
        sys.exit(
            0
            if text == PAGE.read_text(encoding="utf-8")
            else f"error: {PAGE.name} is not made from docs/results; run scripts/make_results.py"
        )
    PAGE.write_text(text, encoding="utf-8")
    for name, results in found.items():
        draw(results, PICTURES / f"results-{name}.png")


if __name__ == "__main__":
    main()
