"""Write the tables of docs/scaling.md and docs/dev/planner.md and a picture from `gspo plan`'s own predictions.

    python scripts/make_scaling_docs.py [--check] [--no-simulation]

With `--check` nothing is written and the exit code is 1 when a predicted table differs from its page. The picture
needs matplotlib (`pip install 'gspo[report]'`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from page_parts import replaced, table

from gspo.config import load
from gspo.models.shape import SHAPES
from gspo.plan.constants import DEVICES, GB
from gspo.plan.predict import Plan, search
from gspo.plan.scenario import scenario_of
from gspo.plan.show import seconds
from gspo.plan.simulate import simulate
from gspo.plan.workload import Workload, workload_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.plan.measured import BENCHMARKS

PAGE, FIT_PAGE = Path("docs/scaling.md"), Path("docs/dev/planner.md")
PICTURE = Path("docs/pictures/scaling-plan.png")
MODELS, SIZES, DEVICE = ("1.5b", "7b", "32b"), (1, 8, 64, 512, 4096), DEVICES["h200"]
OVERRIDES = (
    "actor_rollout_ref.model.path=7b",
    "data.train_batch_size=512",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "data.max_prompt_length=1024",
    "data.max_response_length=8192",
    "algorithm.filter_groups.enable=true",
)
SIMULATED_STEPS = 100


def work_of(eta: int = 2, grown: int = 1) -> Workload:
    """The work of the page, with `grown` times as many prompts per step."""
    work = workload_of(load(None, list(OVERRIDES)).config, mean_prompt=512.0, keep_rate=0.5)
    flight = None if work.in_flight is None else work.in_flight * grown
    return dataclasses.replace(work, eta=eta, prompts=work.prompts * grown, in_flight=flight)


def plans(work: Workload) -> dict[str, dict[int, Plan]]:
    return {m: {n: search(SHAPES[m], DEVICE, n, work) for n in SIZES} for m in MODELS}


def split_text(plan: Plan) -> str:
    best = plan.best
    assert best is not None
    s = best.split
    where = f"{s.trainers:,} + {s.rollout:,}" if s.separate else f"{s.trainers:,} for both"
    extra = [f"tp {s.tp}"] if s.tp > 1 else []
    extra += ["recompute"] if s.checkpointing else []
    return ", ".join([where, *extra])


def main_table(found: dict[str, dict[int, Plan]]) -> str:
    head = ["model", "GPUs", "mode", "train + rollout", "step", "tokens/s", "per GPU", "GB per trainer, per rollout GPU", "limited by"]  # fmt: skip
    rows = []
    for model, by_size in found.items():
        for gpus, plan in by_size.items():
            best = plan.best
            if best is None:
                rows.append([model, f"{gpus:,}", "does not fit", "", "", "", "", "", "memory"])
                continue
            memory = f"{best.trainer_memory.total / GB:.0f}, {best.rollout_memory.total / GB:.0f}"
            speed = best.tokens_per_s
            rows.append([
                model, f"{gpus:,}", best.mode, split_text(plan), seconds(best.step_s), f"{speed:,.0f}",
                f"{speed / gpus:,.0f}", memory, best.limit,
            ])  # fmt: skip
    return table(head, rows)


def grown_table() -> str:
    rows = []
    for gpus, grown in ((64, 1), (512, 8), (4096, 64)):
        best = search(SHAPES["7b"], DEVICE, gpus, work_of(grown=grown)).best
        assert best is not None
        speed = best.tokens_per_s
        cells = [f"{gpus:,}", f"{512 * grown:,}", seconds(best.step_s), f"{speed:,.0f}", f"{speed / gpus:,.0f}"]
        rows.append([*cells, best.limit])
    return table(["GPUs", "prompts per step", "step", "tokens/s", "per GPU", "limited by"], rows)


def eta_table() -> str:
    rows = []
    for eta in (0, 1, 2, 4, 8):
        cells = [str(eta)]
        for gpus in (64, 512, 4096):
            found = search(SHAPES["7b"], DEVICE, gpus, work_of(eta)).found
            best = next(p for p in found if p.eta == eta and (p.split.separate or not eta))
            cells += [seconds(best.step_s), best.limit]
        rows.append(cells)
    return table(["η", "64 GPUs", "limited by", "512 GPUs", "limited by", "4,096 GPUs", "limited by"], rows)


def measured_table() -> str:
    rows = []
    for b in BENCHMARKS:
        name = f"`{b.model}` {b.prompts} × {b.group}, {b.prompt:,}+{b.response:,}"
        for part, measured, predict in (
            ("rollout, s", b.rollout_s, b.predicted_rollout_s),
            ("training, s", b.train_s, b.predicted_train_s),
            ("peak, GiB", b.peak_gib, b.predicted_peak_gib),
        ):
            if measured is not None:
                p = predict()
                rows.append([name, part, f"{p:.3g}", f"{measured:.3g}", f"{p / measured:.2f}", b.source])
    return table(["work", "part", "predicted", "measured", "ratio", "measured how"], rows)


def simulated_table(found: dict[str, dict[int, Plan]]) -> str:
    head = ["model", "GPUs", "step", "goodput", "trainer idle", "rollout idle", "failures per day", "checkpoint", "every", "staleness"]  # fmt: skip
    rows = []
    for model, by_size in found.items():
        for gpus, plan in by_size.items():
            if plan.best is None or gpus == 1:
                continue
            scenario = scenario_of(plan.best, plan.work, steps=SIMULATED_STEPS)
            calm = dataclasses.replace(scenario, mtbf_s=math.inf, sigma=0.0, slow_share=0.0)
            real, ideal = simulate(scenario), simulate(calm)
            ages = sum(real.staleness.values())
            mean = sum(age * count for age, count in real.staleness.items()) / ages
            rows.append([
                model, f"{gpus:,}", seconds(real.step_s), f"{ideal.step_s / real.step_s:.0%}", f"{real.trainer_idle:.0%}",
                f"{real.rollout_idle:.0%}", f"{gpus * 86400 / scenario.mtbf_s:.2g}", seconds(scenario.save_s),
                seconds(scenario.interval_s), f"{mean:.2f}, at most {max(real.staleness)}",
            ])  # fmt: skip
    return table(head, rows)


def draw(found: dict[str, dict[int, Plan]], path: Path) -> None:
    """Tokens per second over GPUs, and what the step of the 7B model is spent on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = ("#2f6bd8", "#d9630a", "#178a5c", "#b8389a", "#6a50c7", "#0c8599", "#a3600d", "#6b7280")
    figure = Figure(figsize=(11.0, 3.8), dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.0))
    figure.subplots_adjust(left=0.07, right=0.79, bottom=0.14, top=0.88, wspace=0.22)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#eceff3", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        ax.set_xlabel("H200 GPUs", fontsize=9)
    for colour, (model, by_size) in zip(colours, found.items()):
        points = [(n, p.best.tokens_per_s) for n, p in by_size.items() if p.best is not None]
        left.plot(*zip(*points), marker="o", markersize=4, color=colour, label=model)
        first, speed = points[0]
        left.plot([first, SIZES[-1]], [speed, speed * SIZES[-1] / first], color=colour, linewidth=0.8, linestyle=":")
    left.set(xscale="log", yscale="log", xticks=SIZES, xticklabels=[f"{n:,}" for n in SIZES])
    left.set_title("predicted trained response tokens per second (dotted: linear)", fontsize=9, loc="left")
    left.legend(fontsize=8, frameon=False)
    _stack(right, found["7b"], colours)
    right.set_title("predicted: what the 7B step is spent on", fontsize=9, loc="left")
    FigureCanvasAgg(figure).print_png(str(path), pil_kwargs={"compress_level": 9})


def _stack(ax: Any, by_size: dict[int, Plan], colours: tuple[str, ...]) -> None:
    shown = {n: p.best for n, p in by_size.items() if p.best is not None}
    weight: dict[str, float] = {}
    for best in shown.values():
        for name, s in best.parts.items():
            weight[name] = max(weight.get(name, 0.0), s / best.step_s)
    names = sorted(weight, key=lambda n: -weight[n])[: len(colours) - 1]
    below = [0.0] * len(shown)
    for name, colour in zip([*names, "everything else"], colours):
        rest = name not in weight
        shares = [
            (sum(s for n, s in b.parts.items() if n not in names) if rest else b.parts.get(name, 0.0)) / b.step_s * 100
            for b in shown.values()
        ]
        ax.bar(range(len(shown)), shares, 0.6, bottom=below, color=colour, label=name)
        below = [a + b for a, b in zip(below, shares)]
    ax.set(xticks=range(len(shown)), xticklabels=[f"{n:,}" for n in shown], ylim=(0, 100))
    ax.set_ylabel("% of the step", fontsize=9)
    ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table differs")
    parser.add_argument("--no-simulation", action="store_true", help="leave the simulated table as it is")
    given = parser.parse_args()
    found = plans(work_of())
    tables = {"predicted": main_table(found), "grown": grown_table(), "eta": eta_table()}
    if not (given.check or given.no_simulation):
        tables["simulated"] = simulated_table(found)
    pages = {PAGE: replaced(PAGE, tables), FIT_PAGE: replaced(FIT_PAGE, {"measured": measured_table()})}
    if given.check:
        stale = [str(p) for p, text in pages.items() if text != p.read_text(encoding="utf-8")]
        sys.exit(f"error: {', '.join(stale)} out of date; run python scripts/make_scaling_docs.py" if stale else 0)
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(found, PICTURE)


if __name__ == "__main__":
    main()
