"""Plans, simulations and comparisons as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gspo.plan import constants
from gspo.plan.check import Comparison
from gspo.plan.constants import DEVICES, GB, Constant, Device
from gspo.plan.memory import Memory
from gspo.plan.predict import Plan, Prediction
from gspo.plan.scenario import Outcome, Scenario
from gspo.plan.transfers import daly_interval, useful_share, young_interval

SHOWN_PARTS = 6
LAYOUTS = {"shared": "packed with shared prompts", "packed": "packed", "plain": "padded"}


def plan_text(plan: Plan) -> str:
    """Everything predicted, fastest mode first. Some mode must fit."""
    best = plan.best
    assert best is not None
    lines = [*_work(plan), "", *_modes(plan.found), "", *_times(best), "", *_memory(plan, best), "", *_failures(best)]
    lines += ["", "keys for this split: " + " ".join(keys_of(best, plan.device))]
    return "\n".join(lines) + "\n"


def _work(plan: Plan) -> list[str]:
    s, w = plan.shape, plan.work
    active = f", {count(s.active)} active" if s.experts else ""
    kept = f", {w.keep_rate:.0%} of groups kept" if w.keep_rate < 1 else ""
    return [
        f"plan: {s.name} ({count(s.parameters)} parameters{active}) on {plan.gpus:,} {plan.device.name}; "
        f"{plan.tried:,} splits tried. Predictions, not measurements.",
        f"work per step: {w.prompts:,} prompts × {w.group_size} responses{kept}; prompts of {w.mean_prompt:,.0f} tokens, responses "
        f"of {w.lengths.mean:,.0f} tokens on average and {w.lengths.longest:,} at most; "
        f"{w.mini_batches} × {w.epochs} optimiser steps (mini-batches × epochs), rows {LAYOUTS[w.layout]}",
    ]


def _modes(found: Sequence[Prediction]) -> list[str]:
    head = ["mode", "trainers", "rollout", "tp", "fsdp_size", "recompute", "step", "tokens/s", "limited by"]
    rows = [
        [
            p.mode, f"{p.split.trainers:,}", f"{p.split.rollout:,}", str(p.split.tp), f"{p.split.shard:,}",
            "yes" if p.split.checkpointing else "no", seconds(p.step_s), f"{p.tokens_per_s:,.0f}", p.limit,
        ]
        for p in found
    ]  # fmt: skip
    return table(head, rows, left=(0, 8))


def _times(best: Prediction) -> list[str]:
    rows = [[name, seconds(s)] for name, s in best.stages.items()]
    parts = [[n, seconds(s), f"{s / best.step_s:.0%}"] for n, s in best.parts.ranked()[:SHOWN_PARTS]]
    engine = (
        f"each engine: {best.slots:,} slots, {best.rollout.rows:,.0f} busy on average; {best.rollout.step_s * 1e3:.2f} ms per decode "
        f"step, {seconds(best.group_s)} per group"
    )
    return [
        f"time per stage ({best.mode})", *table(["stage", "time"], rows), "",
        "where the step time goes", *table(["", "time", "share"], parts), "", engine,
    ]  # fmt: skip


def _memory(plan: Plan, best: Prediction) -> list[str]:
    devices = {"device": best.trainer_memory}
    if best.split.separate:
        devices = {"trainer": best.trainer_memory, "rollout": best.rollout_memory}
    return [
        f"memory per device, of {plan.device.memory / GB:,.0f} GB",
        *(f"  {name}: {m.total / GB:,.1f} GB in {m.peak_stage} = {_parts(m)}" for name, m in devices.items()),
    ]


def _parts(memory: Memory) -> str:
    items = sorted(memory.at_peak.items(), key=lambda item: -item[1])
    return " + ".join(f"{name} {size / GB:,.1f}" for name, size in items if size >= 0.05 * GB)


def _failures(best: Prediction) -> list[str]:
    mtbf = constants.MTBF_DEVICE_S / best.split.trainers
    interval = daly_interval(best.checkpoint_s, mtbf)
    share = useful_share(interval, best.checkpoint_s, constants.TRAINER_RESTART_S, mtbf)
    return [
        f"failures: some trainer rank fails every {seconds(mtbf)} on average. A checkpoint takes "
        f"{seconds(best.checkpoint_s)}; the best interval is {seconds(interval)} of work or "
        f"{max(1, round(interval / best.step_s)):,} steps (Daly; by Young's formula "
        f"{seconds(young_interval(best.checkpoint_s, mtbf))}). Then {share:.1%} of the time is useful work"
    ]


def keys_of(best: Prediction, device: Device) -> list[str]:
    """The config keys that select this split."""
    s = best.split
    devices, rollout, per_machine = s.devices, "actor_rollout_ref.rollout", device.per_machine
    out = []
    if devices > 1:
        machines = -(-devices // per_machine)
        out += ["trainer.backend=ray"] if machines > 1 else []
        out += [f"trainer.nnodes={machines}", f"trainer.n_gpus_per_node={min(devices, per_machine)}"]
    if s.trainers > 1:
        out += ["actor_rollout_ref.actor.strategy=fsdp2"]
        if s.shard != s.trainers:
            out += [f"actor_rollout_ref.actor.fsdp_config.fsdp_size={s.shard}"]
    if s.checkpointing:
        out += ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
    if best.eta:
        out += [f"{rollout}.mode=async", f"{rollout}.max_head_offpolicyness={best.eta}"]
    if s.separate:
        out += [f"{rollout}.num_workers={s.engines}"]
    if s.tp > 1:
        out += [f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size={s.tp}"]
    held = best.rollout_memory
    share = (held.total if s.tp > 1 else held.held.get("KV cache", 0.0)) / device.memory
    if share > 0.5:  # the key bounds all of vLLM's memory, but only the cache of the native engine
        out += [f"{rollout}.gpu_memory_utilization={min(0.95, share):.2f}"]
    return [*out, f"{rollout}.max_num_seqs={best.slots}"]


def outcome_text(scenario: Scenario, real: Outcome, ideal: Outcome) -> str:
    """A simulated run compared with one without stragglers and failures."""
    ages = sum(real.staleness.values()) or 1
    spread = ", ".join(f"{age}: {count / ages:.0%}" for age, count in sorted(real.staleness.items()))
    rows = [
        ["steps kept, groups trained on", f"{real.steps:,}, {real.trained:,}"],
        ["total time", seconds(real.seconds)],
        ["time per step", f"{seconds(real.step_s)}; {seconds(ideal.step_s)} without stragglers and failures"],
        ["goodput", f"{ideal.step_s / real.step_s:.1%}"],
        ["idle: trainer, rollout slots", f"{real.trainer_idle:.1%}, {real.rollout_idle:.1%}"],
        ["failures: workers, trainer", f"{real.worker_failures:,}, {real.trainer_failures:,}"],
        ["groups restarted, steps lost", f"{real.regenerated:,}, {real.lost_steps:,}"],
        ["checkpoints", f"{real.saves:,}, {_interval(scenario.interval_s)}"],
        ["staleness of groups trained on", spread],
    ]
    title = (
        f"simulated: {scenario.workers:,} workers with {scenario.group_slots} groups each, "
        f"{scenario.trainer_devices:,} trainer ranks, seed {scenario.seed}"
    )
    return "\n".join([title, *table(["", ""], rows, left=(0, 1))[1:]]) + "\n"


def _interval(value: float) -> str:
    return f"one every {seconds(value)}" if math.isfinite(value) else "none before the end"


def comparison_text(found: Comparison) -> str:
    """Predicted and measured seconds, stage by stage."""
    rows = [[n, f"{p:.4f}", f"{m:.4f}", f"{p / m:.2f}" if m > 1e-3 else "–"] for n, p, m in found.rows]
    title = f"{found.shape.name} on {found.device.name}: predicted against the median of {found.num_steps} steps"
    return "\n".join([title, *table(["stage", "predicted s", "measured s", "ratio"], rows)]) + "\n"


def constants_text() -> str:
    """Every device and constant with its source."""
    rates = [(f"{d.bandwidth / 1e12:.2f} TB/s", f"{d.matmul / 1e12:.1f} TFLOP/s") for d in DEVICES.values()]
    rows = [[d.name, f"{d.memory / GB:.0f} GB", *rate, d.source] for d, rate in zip(DEVICES.values(), rates)]
    named = [(name, value) for name, value in vars(constants).items() if isinstance(value, Constant)]
    named += [(f"MEASURED_MATMUL {name}", value) for name, value in constants.MEASURED_MATMUL.items()]
    figures = [[name, f"{value:.4g}", value.kind, value.source] for name, value in named]
    devices = table(["device", "memory", "bandwidth", "matrix products", "source"], rows, left=(0, 4))
    return "\n".join([*devices, "", *table(["constant", "value", "kind", "source"], figures, left=(0, 2, 3))]) + "\n"


def seconds(value: float) -> str:
    """A time in a readable unit."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def count(value: float) -> str:
    """A number of parameters."""
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.2f} M"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns: those in `left` to the left, the others to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  " + "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in cells
    ]
