"""Stage timing: `with clock("gen"): …` adds up seconds by stage for one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gspo.metrics import Metric, Metrics


class Clock:
    """Seconds by stage since the last `reset`; `stage` is the one that runs now, for watchdogs and messages.

    `beats` counts signs of progress: every start and end of a stage, and every call of `beat`. `watch` gets the name of
    each stage that begins, and None when the outermost one ends.
    """

    def __init__(self, watch: Callable[[str | None], None] | None = None) -> None:
        self.stage: str | None = None
        self._watch = watch or (lambda stage: None)
        self.beats = 0
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        outer, self.stage = self.stage, stage
        self.beat()
        self._watch(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
            self.stage = outer
            self.beat()
            self._watch(outer)

    def beat(self) -> None:
        """Report progress within a stage."""
        self.beats += 1

    def metrics(self) -> Metrics:
        """`timing_s/<stage>` and `timing_s/step`, the whole time since the reset."""
        out = {f"timing_s/{name}": Metric("sum", value) for name, value in self.seconds.items()}
        out["timing_s/step"] = Metric("sum", time.perf_counter() - self.started)
        return out
