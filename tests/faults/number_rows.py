"""Rows F7 and F8: bad numbers do no harm, and starved sampling ends well."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo.checkpoint import folder as checkpoint
from gspo.types import LossOutput, Reward
from tests.faults.kill_rows import Bench, with_bench
from tests.faults.row import Check


def poison(trainer_module: Any, what: str, steps: tuple[int, ...], value: float, log: Path) -> None:
    """Put `value` into the loss, a gradient or a log-prob in `steps`; log whether the weights stayed the same."""
    trainer = trainer_module.Trainer
    train_step = trainer.train_step

    @functools.wraps(train_step)
    def step(self: Any) -> None:
        policy = self.parts.policy
        if self.step not in steps:
            return train_step(self)
        before = [p.detach().clone() for p in policy.model.parameters()]
        undo = _INJECT[what](self.parts, value)
        try:
            return train_step(self)
        finally:
            undo()
            same = all(bool((a == b).all()) for a, b in zip(before, policy.model.parameters()))
            with open(log, "a") as f:
                f.write(f"{'same' if same else 'CHANGED'}\n")

    trainer.train_step = step


def _bad_loss(parts: Any, value: float) -> Callable[[], None]:
    original = parts.objective.loss

    def loss() -> Callable[[Any], LossOutput]:
        inner = original()

        def bad(x: Any) -> LossOutput:
            out = inner(x)
            return LossOutput(out.loss * value, out.metrics)

        return bad

    return _swap(parts.objective, "loss", loss)


def _bad_gradient(parts: Any, value: float) -> Callable[[], None]:
    parameter = next(iter(parts.policy.model.parameters()))
    handle = parameter.register_hook(lambda grad: grad * value)
    return handle.remove


def _bad_log_prob(parts: Any, value: float) -> Callable[[], None]:
    original = parts.policy.forward

    def forward(micro: Any, *, entropy: bool = False) -> Any:
        log_probs, entropies = original(micro, entropy=entropy)
        return log_probs * value, entropies

    return _swap(parts.policy, "forward", forward)


def _swap(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Replace a method of one object; returns a function that restores it."""
    setattr(owner, name, new)
    return lambda: delattr(owner, name)


_INJECT = {"loss": _bad_loss, "gradient": _bad_gradient, "log-prob": _bad_log_prob}


def bad_numbers(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """F7: NaN and inf in loss, gradient and log-prob: skipped, weights the same, counted; three steps in a row stop."""
    bad = []
    for what in _INJECT:
        for value in (float("nan"), float("inf")):
            name = f"{what}-{value}"
            log = bench.folder / f"{name}.weights"
            step = rng.randint(0, 3)
            child = bench.start(name, prepare=lambda m, w=what, s=step, v=value, f=log: poison(m, w, (s,), v, f))
            code = child.wait()
            rows = [json.loads(line) for line in (bench.folder / name / "metrics.jsonl").read_text().splitlines()]
            counted = next(r["actor/skipped_updates"] for r in rows if r["step"] == step + 1)
            if code != 0 or log.read_text().split() != ["same"] or counted != 2 or "non-finite" not in child.output():
                bad.append(name)
    name, log = "in-a-row", bench.folder / "in-a-row.weights"
    child = bench.start(name, prepare=lambda m: poison(m, "loss", (1, 2, 3), float("nan"), log))
    if child.wait() != 4 or "in a row" not in child.output() or log.read_text().split() != ["same"] * 3:
        bad.append("three in a row")
    return (
        not bad,
        "6 injections skipped to the bit and counted; three in a row stop with code 4" if not bad else f"not: {bad}",
    )


def all_right(prompt: Any, response: str) -> Reward:
    return Reward(score=1.0, acc=1.0)


def all_wrong(prompt: Any, response: str) -> Reward:
    return Reward(score=0.0, acc=0.0)


def starved(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """F8: all-right and all-wrong data end with the named reason and a checkpoint, or go on as on_limit says."""
    bad = []
    for reward, reason in ((all_right, "all_right"), (all_wrong, "all_wrong")):
        name = f"starved-{reason}"
        child = bench.start(name, reward=reward)
        code = child.wait()
        saved = checkpoint.latest(bench.folder / name / "checkpoints")[0]
        if code != 3 or reason.replace("_", " ") not in child.output().replace("_", " ") or saved is None:
            bad.append(name)
        limited = bench.start(f"{name}-limit", "algorithm.filter_groups.max_num_gen_batches=2", reward=reward)
        text = "num_gen_batches=2 >= max_num_gen_batches=2. Generated too many batches. Please check if your data are too difficult."
        if limited.wait() != 3 or text not in limited.output():
            bad.append(f"{name} with a limit")
        on = bench.start(f"{name}-on", "algorithm.filter_groups.on_limit=keep_unfiltered", reward=reward)
        if on.wait() != 0:
            bad.append(f"{name} kept unfiltered")
    return not bad, "named reason, checkpoint, on_limit honoured" if not bad else f"not: {bad}"


ROWS: dict[str, Check] = {
    "F7": with_bench(bad_numbers, "F7", "NaN or inf in loss, gradient, log-prob"),
    "F8": with_bench(starved, "F8", "all-right, all-wrong data"),
}
