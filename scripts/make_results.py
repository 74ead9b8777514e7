"""Write the tables of docs/results.md and its pictures from the files in docs/results.

    python scripts/make_results.py [--check]

With `--check` nothing is written and the exit code is 1 when a table differs from the page. The pictures need
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from page_parts import replaced, table

from gspo.evaluation.evaluator import wilson
from gspo.runs.stats import paired_difference

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS, PICTURES = ROOT / "docs" / "results.md", ROOT / "docs" / "results", ROOT / "docs" / "pictures"
COLOURS = ("#2f6bd8", "#d9630a", "#178a5c", "#b8389a", "#6a50c7", "#0c8599", "#a3600d", "#6b7280")
T95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's 97.5 % quantile by the number of runs."""
Results = dict[str, list[dict[str, Any]]]
"""The results of a table, by method, in the order of their seeds."""


def read_results(name: str, methods: Sequence[str]) -> Results:
    found: Results = defaultdict(list)
    for file in sorted((RESULTS / name).glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found[result["method"]].append(result | {"file": file.relative_to(PAGE.parent).as_posix()})
    return {method: found[method] for method in methods if method in found}


def show(results: Results) -> str:
    """Means over seeds, a row per run, and the differences from the start and from the first method with the same seed."""
    runs = [run for members in results.values() for run in members]
    return "\n\n".join(part for part in (_means(results), _runs(runs), _differences(results), _commands(runs)) if part)


def _means(results: Results) -> str:
    """A row per method with three seeds or more: the means over runs with their intervals, and the difference from the first."""
    firsts = {run["seed"]: run["curve"][-1]["acc"] for run in next(iter(results.values()), [])}
    rows = []
    for number, (method, members) in enumerate(results.items()):
        if len(members) < 3:
            continue
        starts, ends = ([run["curve"][i]["acc"] for run in members] for i in (0, -1))
        pairs = [run["curve"][-1]["acc"] - firsts[run["seed"]] for run in members if number and run["seed"] in firsts]
        rows.append([
            method, str(len(members)), _percent(statistics.fmean(starts)), _mean(ends, ".1f", lowest=0.0),
            _mean([end - start for start, end in zip(starts, ends)], "+.1f"), _mean(pairs, "+.1f") if len(pairs) > 2 else "–",
        ])  # fmt: skip
    head = ["method", "seeds", "start, mean", "end, mean in % (95 % over seeds)", "change in points", f"points beyond {next(iter(results), '')}"]  # fmt: skip
    return table(head, rows) if rows else ""


def _mean(shares: Sequence[float], form: str, lowest: float = -100.0) -> str:
    """The mean of shares in per cent, with Student's interval over the runs, cut at what a share can be."""
    mean, half = 100 * statistics.fmean(shares), 100 * T95[len(shares)] * statistics.stdev(shares) / len(shares) ** 0.5
    return f"{mean:{form}} ({max(mean - half, lowest):{form}} to {min(mean + half, 100.0):{form}})"


def _runs(runs: list[dict[str, Any]]) -> str:
    columns = {
        "run": lambda run: f"[{run['method']}, seed {run['seed']}]({run['file']})",
        "steps": lambda run: f"{run['curve'][-1]['step']}",
        "greedy, start": lambda run: _percent(run["curve"][0]["acc"]),
        "greedy, end (95 %)": lambda run: f"{_percent(run['curve'][-1]['acc'])} ({_interval(run['curve'][-1])})",
        "avg@4": _sampled,
        "well-formed": lambda run: _change(run, "well_formed", _percent),
        "tool calls": lambda run: _change(run, "tool_calls", _percent),
        "tokens per answer": lambda run: _change(run, "length", "{:.0f}".format),
        "clipped": lambda run: _step_mean(run, "actor/pg_clipfrac_later"),
        "experts changed": lambda run: _step_mean(run, "actor/router_change"),
        "generated": lambda run: _tokens(run["curve"][-1]["generated_tokens"]),
        "time": lambda run: f"{run['curve'][-1]['seconds']:.0f} s",
    }
    cells = {name: [column(run) for run in runs] for name, column in columns.items()}
    shown = {
        name: column for name, column in cells.items() if any(cell not in ("–", "0.0 % → 0.0 %") for cell in column)
    }
    return table(list(shown), [list(row) for row in zip(*shown.values())])


def _sampled(run: dict[str, Any]) -> str:
    accuracy = (run.get("samples") or {}).get("sampled", {}).get("accuracy")
    return "–" if accuracy is None else _percent(accuracy)


def _change(run: dict[str, Any], name: str, form: Callable[[float], str]) -> str:
    first, last = run["curve"][0], run["curve"][-1]
    return f"{form(first[name])} → {form(last[name])}" if name in first and name in last else "–"


def _step_mean(run: dict[str, Any], name: str) -> str:
    """The mean of a metric that is a share, over the steps that have it."""
    shares = [share for share in run["steps"].get(name, []) if share is not None]
    return _percent(statistics.fmean(shares)) if shares else "–"


def _tokens(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


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


def draw(results: Results, path: Path) -> None:
    """Greedy accuracy on the held-out questions over generated tokens, a line per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), dpi=120)
    ax = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.15, top=0.95)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#eceff3", linewidth=0.8)
    most = max(point["generated_tokens"] for members in results.values() for run in members for point in run["curve"])
    unit, word = (1e6, "millions") if most >= 1e6 else (1e3, "thousands")
    for colour, (method, members) in zip(COLOURS, results.items()):
        for number, run in enumerate(members):
            points = [(point["generated_tokens"] / unit, 100 * point["acc"]) for point in run["curve"]]
            ax.plot(*zip(*points), marker="o", markersize=4, color=colour, label=None if number else method)
    ax.set_xlabel(f"generated tokens, {word}", fontsize=9)
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
