"""Figures measured on a GPU, and what the plan says to the same work."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.plan.constants import DEVICES, GIB
from gspo.plan.decode import Engine, generate
from gspo.plan.lengths import Lengths
from gspo.plan.memory import Memory, colocated_memory, engine_memory, trainer_memory
from gspo.plan.shape import SHAPES, ModelShape
from gspo.plan.training import Trainer
from gspo.plan.workload import Workload

DEVICE = DEVICES["h200"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A measured figure that a prediction can be held against: one H200, all answers at full length."""

    model: str
    prompts: int
    group: int
    prompt: int
    response: int
    source: str
    rollout_s: float | None = None
    train_s: float | None = None  # scoring and update
    peak_gib: float | None = None  # as torch's allocator counts it: without libraries and fragmentation
    mini_batches: int = 4
    token_budget: int = 16384
    score_share: float = 1.0
    checkpointing: bool = False
    compiled: bool = True
    offload: bool = False
    old: bool = False  # eager decoding, padded rows and no fused head

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
            layout="plain" if self.old else "shared",
            eager=self.old,
            paged=not self.old,
            fused_head=not self.old,
            compiled=self.compiled,
            offload=self.offload,
        )

    def predicted_rollout_s(self) -> float:
        work = self.work
        engine = Engine(self.shape, DEVICE, eager=work.eager, fused_head=work.fused_head)
        return generate(engine, work.rows, 1, work.rows, work.lengths, work.prompt, work.group).total

    def predicted_train_s(self) -> float:
        work, trainer = self.work, Trainer(self.shape, DEVICE, checkpointing=self.checkpointing)
        return trainer.score(work).total + trainer.update(work).total

    def predicted_peak_gib(self) -> float:
        work = self.work
        trainer = trainer_memory(self.shape, DEVICE, work, ranks=1, shard=1, checkpointing=self.checkpointing)
        if Trainer(self.shape, DEVICE, checkpointing=self.checkpointing).captures(work):
            return counted_when_captured(trainer) / GIB
        if self.rollout_s is None:
            return trainer.total / GIB
        engine = engine_memory(self.shape, DEVICE, work, tp=1, slots=work.rows)
        return colocated_memory(trainer, engine, one_process=True, paged=work.paged).total / GIB


def counted_when_captured(trainer: Memory) -> float:
    """Bytes torch's allocator counts at most for captured training, which is less than what the device must have.

    It counts what a graph keeps for its backward while the graph is captured, at the first scoring, when there are
    neither gradient sums nor moments; a graph that runs again uses that memory uncounted. The gradients that a graph
    writes, as narrow as the weights, stay.
    """
    held = trainer.held
    always = 2 * held["parameters"] + held.get("float32 masters", 0.0)
    capturing = held["activations of a micro-batch"] + held["temporaries of a layer"]
    running = held.get("optimiser", 0.0) + held["gradients"] + held["logits of a chunk"]
    return always + max(capturing, running)


_NOW = "docs/performance.md, On a GPU"
_STEP = f"{_NOW}, captured, 8,500 tokens a micro-batch"
_LONG = f"{_NOW}, gradient checkpointing, 8,192 tokens a micro-batch"
_BARE = "bare compiled decode loop, without an engine around it"
_BEFORE = f"{_NOW}, last line: eager decoding, padded rows"
BENCHMARKS = (
    Benchmark("smol", 32, 8, 32, 128, _NOW, rollout_s=256 * 128 / 143_300),
    Benchmark("smol", 128, 8, 32, 128, _NOW, rollout_s=1024 * 128 / 270_800),
    Benchmark(
        "smol", 32, 8, 32, 128, _STEP,
        rollout_s=0.2315, train_s=0.199, peak_gib=6.34, token_budget=8500, score_share=0.75,
    ),
    Benchmark(
        "qwen1.5b", 32, 8, 32, 128, _STEP,
        rollout_s=0.425, train_s=0.882, peak_gib=30.4, token_budget=8500, score_share=0.75,
    ),
    Benchmark(
        "qwen1.5b", 1, 8, 64, 8128, f"{_LONG}, nothing compiled, nothing scored",
        train_s=3.07, peak_gib=28.5, mini_batches=1, token_budget=8192, score_share=0.0, checkpointing=True,
        compiled=False,
    ),
    Benchmark(
        "qwen1.5b", 2, 1, 32, 32736, f"{_LONG}; with the first time's warm-up",
        train_s=4.7, peak_gib=33.38, mini_batches=1, token_budget=8192, checkpointing=True,
    ),
    Benchmark("smol", 32, 8, 32, 128, _BARE, rollout_s=256 * 128 / 138_000),
    Benchmark("smol", 128, 8, 32, 128, _BARE, rollout_s=1024 * 128 / 276_000),
    Benchmark("smol", 32, 8, 32, 128, _BEFORE, rollout_s=4.11, train_s=0.84, old=True),
    Benchmark("qwen1.5b", 32, 8, 32, 128, _BEFORE, rollout_s=2.58, train_s=4.09, old=True),
)  # fmt: skip
