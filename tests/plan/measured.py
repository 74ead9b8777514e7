"""Figures measured on a GPU, and the predictions for the same work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo.kernels.sizes import PAGE
from gspo.models.shape import SHAPES, ModelShape
from gspo.plan.constants import DEVICES, GIB
from gspo.plan.decode import DecodeCost, generate
from gspo.plan.lengths import Lengths
from gspo.plan.memory import ModelSize, colocated_memory, engine_memory, trainer_memory
from gspo.plan.split import Split
from gspo.plan.train_time import TrainCost
from gspo.plan.workload import Workload

DEVICE = DEVICES["h200"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Measured figures to compare a prediction with: one H200, all responses at full length."""

    model: str
    prompts: int
    group: int
    prompt: int
    response: int
    source: str
    rollout_s: float | None = None
    train_s: float | None = None  # scoring and update
    peak_gib: float | None = None  # reserved by torch, without libraries
    generates: bool = True
    trains: bool = True
    mini_batches: int = 4
    token_budget: int = 16384
    score_share: float = 1.0
    checkpointing: bool = False
    compiled: bool = True
    offload: bool = False
    eager: bool = False  # decoding without CUDA graphs

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.model]

    @property
    def work(self) -> Workload:
        return Workload(
            self.prompts,
            self.group,
            self.prompt,
            self.prompt,
            Lengths(float(self.response), self.response, 0.0),
            mini_batches=self.mini_batches,
            token_budget=self.token_budget,
            score_share=self.score_share,
            eager=self.eager,
            compiled=self.compiled,
            offload=self.offload,
        )

    def predicted_rollout_s(self) -> float:
        work = self.work
        engine = DecodeCost(self.shape, DEVICE, eager=work.eager)
        return generate(engine, work.rows, 1, work.rows, work.lengths, work.mean_prompt, work.group_size).total

    def predicted_train_s(self) -> float:
        work, trainer = self.work, TrainCost(self.shape, DEVICE, Split(checkpointing=self.checkpointing))
        return trainer.score(work).total + trainer.update(work).total

    def predicted_peak_gib(self) -> float:
        work, model = self.work, ModelSize.of(self.shape, DEVICE.number_bytes)
        trainer = trainer_memory(model, DEVICE, work, Split(checkpointing=self.checkpointing))
        if not self.generates:
            return trainer.total / GIB
        slot_tokens = work.slot_tokens + 2 * PAGE  # as the engine allocates
        engine = engine_memory(model, DEVICE, work, tp=1, slots=work.rows, slot_tokens=slot_tokens)
        if not self.trains:
            return engine.total / GIB
        return colocated_memory(trainer, engine, DEVICE, one_process=True).total / GIB


_NOW = "docs/performance.md, On a GPU"
_REAL = "docs/performance.md, Real work"
_STEP = f"{_NOW}, captured, 8,500 tokens per micro-batch"
_LONG = f"{_NOW}, gradient checkpointing, nothing scored"
_GIVEN: dict[str, Any] = {"generates": False, "mini_batches": 1, "score_share": 0.0, "checkpointing": True}
_EAGER = f"{_NOW}, last line: eager decoding"
BENCHMARKS = (
    Benchmark("smol", 128, 8, 110, 100, _REAL, rollout_s=1024 * 100 / 331_700),
    Benchmark("0.5b", 64, 16, 110, 266, _REAL, rollout_s=1024 * 266 / 267_900),
    Benchmark("smol", 128, 8, 32, 128, _NOW, peak_gib=5.0, trains=False),
    Benchmark(
        "smol", 32, 8, 32, 128, _STEP,
        rollout_s=0.1948, train_s=0.2206, peak_gib=7.39, token_budget=8500, score_share=0.75,
    ),
    Benchmark(
        "qwen1.5b", 32, 8, 32, 128, _STEP,
        rollout_s=0.399, train_s=0.9766, peak_gib=37.34, token_budget=8500, score_share=0.75,
    ),
    Benchmark(
        "qwen1.5b", 32, 8, 32, 128, f"{_NOW}, captured, 4,300 tokens per micro-batch",
        peak_gib=37.06, token_budget=4300, score_share=0.75,
    ),
    Benchmark(
        "qwen1.5b", 1, 8, 64, 8128, f"{_LONG}, 8,192 tokens per micro-batch",
        train_s=2.38, peak_gib=29.56, token_budget=8192, **_GIVEN,
    ),
    Benchmark(
        "qwen1.5b", 1, 8, 64, 8128, f"{_LONG}, 8,192 tokens per micro-batch, nothing compiled",
        train_s=3.07, token_budget=8192, compiled=False, **_GIVEN,
    ),
    Benchmark(
        "qwen1.5b", 1, 8, 64, 8128, f"{_LONG}, 8,192 tokens per micro-batch, optimizer_offload",
        train_s=2.95, peak_gib=12.5, token_budget=8192, offload=True, **_GIVEN,
    ),
    Benchmark(
        "qwen1.5b", 1, 2, 64, 32704, f"{_LONG}, 32,768 tokens per micro-batch, optimizer_offload",
        train_s=4.55, peak_gib=17.3, token_budget=32768, offload=True, **_GIVEN,
    ),
    Benchmark("smol", 32, 8, 32, 128, _EAGER, rollout_s=4.11, eager=True),
    Benchmark("qwen1.5b", 32, 8, 32, 128, _EAGER, rollout_s=2.58, eager=True),
)  # fmt: skip
