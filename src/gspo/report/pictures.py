"""The main plots as PNG files, for documents and for places without a browser. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gspo.report.overview import clip_band
from gspo.report.thinning import Thinning
from gspo.runs.metric_names import aux_name, held_out_source, is_accuracy
from gspo.runs.run import Run

BLUE, ORANGE, GREEN, PINK = "#2f6bd8", "#d9630a", "#178a5c", "#b8389a"
VIOLET, TEAL, RED = "#6a50c7", "#0c8599", "#c2362b"
FATES = (
    ("kept", "kept", BLUE),
    ("same_score", "same score", "#c9a227"),
    ("all_right", "all right", "#2e9e6b"),
    ("all_wrong", "all wrong", "#dd6b4d"),
    ("filtered", "filtered", "#8d6e63"),
    ("stale_dropped", "stale", "#8b5fbf"),
    ("surplus", "surplus", "#b7d0f5"),
    ("reward_failed", "reward failed", "#c2255c"),
    ("skipped", "skipped", "#a4acb8"),
    ("carried", "carried", "#7fb0f2"),
)
STAGES = (BLUE, ORANGE, GREEN, PINK, VIOLET, TEAL, "#a3600d", "#6b7280")


def draw_pictures(run: Run, index: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `learning, groups, difficulty, ratios, clipping, stability, timing`.png; those without data are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "learning": _learning(run),
        "groups": _groups(run),
        "difficulty": _difficulty(index),
        "ratios": _ratios(run, index),
        "clipping": _clipping(run),
        "stability": _stability(run),
        "timing": _timing(run),
    }
    drawn = {folder / f"{name}.png": figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        FigureCanvasAgg(figure).print_png(str(path), pil_kwargs={"compress_level": 3})
    return list(drawn)


def _figure(num: int = 1) -> tuple[Figure, list[Any]]:
    width = 4.6 * num + (1.4 if num == 1 else 0)
    figure = Figure(figsize=(width, 3.2), dpi=120)
    axes = list(np.atleast_1d(figure.subplots(1, num)))
    # margins in inches, fixed: matplotlib's layout engines take longer than the drawing itself
    figure.subplots_adjust(left=0.6 / width, right=1 - 0.2 / width, bottom=0.15, top=0.9, wspace=0.22)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#eceff3", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.set_xlabel("step", fontsize=9)
        ax.tick_params(labelsize=8)
    return figure, axes


def _series(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    thinning = Thinning(len(run.steps))
    x = np.array(thinning.at(run.steps), dtype=float)
    y = np.array(thinning.extremes(run.metrics.numbers(name)), dtype=float)  # None becomes NaN
    return x[~np.isnan(y)], y[~np.isnan(y)]


def _lines(ax: Any, run: Run, title: str, metrics: Sequence[tuple[str, str, str, str]]) -> None:
    """Draw metrics as lines, each by name, label, colour and style; those without data are left out."""
    ax.set_title(title, fontsize=10)
    for name, label, color, style in metrics:
        x, y = _series(run, name)
        if len(x):
            ax.plot(x, y, style, color=color, label=label, linewidth=1.6)


def _learning(run: Run) -> Figure | None:
    figure, (left, right) = _figure(2)
    trained = ("critic/score/mean", "trained groups", GREEN, "--")
    if run.is_supervised:
        _lines(left, run, "Loss", [("train/loss", "training", BLUE, "-"), ("val/loss", "held out", ORANGE, "o-")])
    else:
        _lines(left, run, "Reward", [("critic/score_all/mean", "all groups", BLUE, "-"), trained])
    for name, color in zip((n for n in run.names() if is_accuracy(n)), STAGES):
        source = held_out_source(name) or name
        x, y = _series(run, name)
        low, high = (_series(run, aux_name(source, f"acc/{end}"))[1] for end in ("ci_low", "ci_high"))
        if len(low) == len(high) == len(x):
            right.fill_between(x, 100 * low, 100 * high, color=color, alpha=0.15, linewidth=0)
        right.plot(x, 100 * y, "o-", color=color, label=source, linewidth=1.6, markersize=4)
    right.set_title("Held-out accuracy, % with 95 % interval", fontsize=10)
    return _finish(figure)


def _finish(figure: Figure) -> Figure | None:
    """Add legends; None for a figure without data."""
    for ax in figure.axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8, framealpha=0.85, edgecolor="none")
    return figure if any(ax.has_data() for ax in figure.axes) else None


def _stack(run: Run, title: str, parts: Sequence[tuple[str, str, str]]) -> Figure | None:
    """Stacked areas of metrics (name, label, colour) over the rows that have any of them."""
    rows = Thinning(len(run.steps)).rows  # the same rows for all parts, so that they stack
    columns = [(label, color, np.array(run.metrics.numbers(name))[rows]) for name, label, color in parts]
    columns = [c for c in columns if np.nan_to_num(c[2]).any()]
    if not columns:
        return None
    keep = np.any([~np.isnan(c[2]) for c in columns], axis=0)
    figure, (ax,) = _figure()
    ax.set_title(title, fontsize=10)
    x = np.array(run.steps, dtype=float)[rows][keep]
    edges, base = np.append(x - 0.5, x[-1] + 0.5), np.zeros(len(x) + 1)
    for label, color, values in columns:
        y = np.nan_to_num(values[keep])
        y = np.append(y, y[-1])
        ax.fill_between(edges, base, base + y, step="post", color=color, label=label, linewidth=0)
        base = base + y
    return _finish(figure)


def _groups(run: Run) -> Figure | None:
    return _stack(run, "Groups by fate", [(f"train/groups_{f}", label, color) for f, label, color in FATES])


def _timing(run: Run) -> Figure | None:
    names = [n for n in run.names() if n.startswith("timing_s/") and n != "timing_s/step"]
    names.sort(key=lambda n: -(run.total(n) or 0.0))
    parts = [(n, n.removeprefix("timing_s/").replace("_", " "), c) for n, c in zip(names, STAGES)]
    return _stack(run, "Time by stage, seconds", parts)


def _difficulty(index: Sequence[dict[str, Any]]) -> Figure | None:
    steps = [e for e in index if e["kind"] == "train" and any(g[4] is not None for g in e["groups"])]
    if not steps:
        return None
    sizes = {g[3] for e in steps for g in e["groups"]}
    levels = sizes.pop() if len(sizes) == 1 and max(sizes) <= 16 else 10
    grid = np.zeros((levels + 1, len(steps)))
    for column, entry in enumerate(steps):
        rates = [min(1.0, max(0.0, g[4])) for g in entry["groups"] if g[4] is not None]
        for rate in rates:
            grid[round(rate * levels), column] += 1 / len(rates)
    figure, (ax,) = _figure()
    ax.grid(False)
    extent = (steps[0]["step"] - 0.5, steps[-1]["step"] + 0.5, -50 / levels, 100 + 50 / levels)
    image = ax.imshow(np.sqrt(grid), aspect="auto", origin="lower", extent=extent, cmap="Blues", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=ax, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0 %", "25 %", "100 %"], fontsize=8)
    bar.set_label("share of the step's prompts", fontsize=8)
    ax.set_title("Prompt difficulty: % of a group's responses right", fontsize=10)
    return figure


def _ratios(run: Run, index: Sequence[dict[str, Any]]) -> Figure | None:
    steps = [e for e in index if e["ratios"]]
    if not steps:
        return None
    x = np.array([e["step"] for e in steps], dtype=float)
    q = np.array([np.quantile(e["ratios"], [0.01, 0.25, 0.5, 0.75, 0.99]) for e in steps]).T
    figure, (left, right) = _figure(2)
    left.fill_between(x, q[0], q[4], color=BLUE, alpha=0.15, linewidth=0, label="1 to 99 %")
    left.fill_between(x, q[1], q[3], color=BLUE, alpha=0.35, linewidth=0, label="25 to 75 %")
    left.plot(x, q[2], color=BLUE, linewidth=1.6, label="median")
    low, high = _band(run, steps, "low"), _band(run, steps, "high")
    if high is not None and low is not None:
        left.plot(x, high, "--", color=RED, linewidth=1.2, label="clip band")
        left.plot(x, -low, "--", color=RED, linewidth=1.2)
        right.axvspan(-low[-1], high[-1], color=RED, alpha=0.08, linewidth=0, label="clip band, last step")
    values = np.concatenate([np.asarray(e["ratios"], dtype=float) for e in steps])
    reach = np.abs(np.quantile(values, [0.002, 0.998])).max() or 1e-6
    width = 0.0 if low is None or high is None else max(low.max(), high.max())
    if width and np.abs(q).max() > 5 * width:  # far tails would flatten the band to a line
        left.set_yscale("symlog", linthresh=width)
    reach = min(reach, 6 * width) if width else reach
    right.hist(np.clip(values, -reach, reach), bins=60, color=BLUE)
    left.set_title("Sequence ratio − 1", fontsize=10)
    right.set_title("Its distribution, all steps", fontsize=10)
    right.set_xlabel("ratio − 1")
    right.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    return _finish(figure)


def _band(run: Run, steps: Sequence[dict[str, Any]], side: str) -> np.ndarray | None:
    """One side of the clip band at each of the steps, None when it is unknown."""
    fallback = clip_band(run)[side]
    logged = dict(zip(run.steps, run.column(f"actor/clip_ratio_{side}")))
    values = [fallback if (value := logged.get(e["step"])) is None else value for e in steps]
    return None if any(v is None for v in values) else np.array(values, dtype=float)


def _clipping(run: Run) -> Figure | None:
    figure, (left, right) = _figure(2)
    sides = [("", "both", BLUE, "-"), ("_lower", "lower", PINK, "--"), ("_upper", "upper", GREEN, ":")]
    by_side = [(f"actor/pg_clipfrac{side}", label, color, style) for side, label, color, style in sides]
    _lines(left, run, "Clip fraction by side", by_side)
    prefix = "actor/pg_clipfrac/mb"
    numbers = sorted(int(name.removeprefix(prefix)) for name in run.names() if name.startswith(prefix))
    batches = [(f"{prefix}{n}", f"mini-batch {n + 1}", color, "-") for n, color in zip(numbers, STAGES)]
    _lines(right, run, "Clip fraction by mini-batch", batches)
    return _finish(figure)


def _stability(run: Run) -> Figure | None:
    figure, axes = _figure(3)
    _lines(axes[0], run, "Entropy", [("actor/entropy", "", TEAL, "-")])
    _lines(axes[1], run, "Response length", [("response_length/mean", "", VIOLET, "-")])
    _lines(axes[2], run, "Gradient norm", [("actor/grad_norm", "", ORANGE, "-")])
    return _finish(figure)
