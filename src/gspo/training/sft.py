"""Supervised warm start: training on the answers of a dataset."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.data.chat_template import encode_answer, encode_prompt
from gspo.data.cursor import PromptCursor
from gspo.data.rows import DataError, Row
from gspo.kernels.ragged import padded
from gspo.models.load import load_model, load_tokenizer, no_progress_bars
from gspo.models.output_head import Head
from gspo.training.batch.batching import micro_batch, split_by_tokens
from gspo.training.log_probs import chosen_log_probs
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.schedule import Schedule
from gspo.types import Prompt, TrainBatch


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Settings of a warm start. `warmup_steps=None` is a twentieth of the steps."""

    steps: int = 1000
    lr: float = 1e-3
    batch_size: int = 64
    max_tokens_per_micro_batch: int = 2048  # including padding
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    max_length: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_tokens_per_micro_batch", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}; expected a number above 0")


@dataclass(frozen=True, slots=True)
class SftStep:
    """The loss of one step (mean negative log-prob per answer token), its gradient norm and learning rate."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer. Only `answer_ids` are trained on."""

    prompt: Prompt
    answer_ids: tuple[int, ...]


def encode_examples(
    rows: Sequence[Row], tokenizer: Any, *, max_length: int, **apply_chat_template_kwargs: Any
) -> list[Example]:
    """Every row as an example; a DataError for one without an answer or longer than `max_length` tokens."""
    examples = []
    for row in rows:
        if row.answer is None:
            raise DataError(row.uid, "is missing; expected a text to train on", field="answer")
        example = Example(
            encode_prompt(row, tokenizer, **apply_chat_template_kwargs), encode_answer(row.answer, tokenizer)
        )
        length = len(example.prompt.token_ids) + len(example.answer_ids)
        if length > max_length:
            raise DataError(
                row.uid, f"is {length} tokens with its prompt; expected at most {max_length}", field="answer"
            )
        examples.append(example)
    return examples


def train_sft(
    model: Any, examples: Sequence[Example], cfg: SftConfig, *, on_step: Callable[[SftStep], None] = lambda step: None
) -> list[SftStep]:
    """Train `model` in place. The same model, examples and config give the same bits.

    Every epoch has each example once, in an order that depends on (seed, epoch).
    """
    cursor = PromptCursor([e.prompt for e in examples], seed=cfg.seed)
    answers = {e.prompt.uid: e for e in examples}
    warmup = cfg.steps // 20 if cfg.warmup_steps is None else cfg.warmup_steps
    schedule = Schedule(cfg.lr, "cosine", warmup, cfg.steps, cfg.min_lr_ratio)
    optimizer = MasterOptimizer(
        model.named_parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, grad_clip=cfg.grad_clip
    )
    head = Head.of(model)
    model.train()
    history = []
    for step in range(cfg.steps):
        prompts = [cursor.next() for _ in range(cfg.batch_size)]  # a cursor without total_epochs never ends
        batch = [answers[prompt.uid] for prompt in prompts if prompt is not None]
        num_tokens = sum(len(e.answer_ids) for e in batch)
        lengths = [len(e.prompt.token_ids) + len(e.answer_ids) for e in batch]
        loss = 0.0
        for picks in split_by_tokens(lengths, range(len(batch)), cfg.max_tokens_per_micro_batch):
            part = -answer_log_probs(model, head, [batch[i] for i in picks]).sum() / num_tokens
            part.backward()
            loss += float(part.detach())
        lr = schedule.at(step)
        result = optimizer.step(lr)
        history.append(SftStep(step, loss, result.grad_norm, lr, num_tokens))
        on_step(history[-1])
    model.eval()
    return history


def answer_log_probs(model: Any, head: Head, batch: Sequence[Example]) -> Tensor:
    """Log-probs of every answer token of the batch, in order, as one flat tensor."""
    prompts, answers = [e.prompt.token_ids for e in batch], [e.answer_ids for e in batch]
    mask = padded([(1,) * len(answer) for answer in answers], max(map(len, answers)))
    rows = TrainBatch(prompts, answers, mask, torch.arange(len(batch)), scores=mask[:, 0], rollout_log_probs=mask)
    micro = micro_batch(rows, range(len(batch)), head.linear.weight.device)
    return chosen_log_probs(head, micro.hidden(model.base_model), micro.targets, 1.0)[0]


class ProgressLine:
    """Writes a line per second about a warm start: step, loss, tokens per second, time left."""

    def __init__(self, total_steps: int, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic):
        self._total = total_steps
        self._write = write
        self._clock = clock
        self._start = clock()
        self._last = self._start
        self._num_tokens = 0

    def __call__(self, step: SftStep) -> None:
        now = self._clock()
        self._num_tokens += step.num_tokens
        done = step.step + 1
        if now - self._last < 1.0 and done < self._total:
            return
        self._last = now
        spent = max(now - self._start, 1e-9)
        left = spent / done * (self._total - done)
        self._write(
            f"step {done}/{self._total}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
            f"{self._num_tokens / spent:,.0f} answer tokens/s  {left:.0f} s left"
        )


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of a warm start. Losses are means over the first and last ten steps."""

    out: str
    steps: int
    num_examples: int
    first_loss: float
    last_loss: float
    skipped_steps: int
    seconds: float


def warm_start(
    model_path: str,
    rows: Sequence[Row],
    out: str | Path,
    cfg: SftConfig,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    on_step: Callable[[SftStep], None] = lambda step: None,
) -> SftResult:
    """Load a model, train it on the answers of `rows`, and save it with its tokenizer as a Hugging Face folder."""
    start = time.monotonic()
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust_remote_code)
    examples = encode_examples(rows, tokenizer, max_length=cfg.max_length)
    torch.manual_seed(cfg.seed)  # for models with dropout
    model = load_model(model_path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    history = train_sft(model, examples, cfg, on_step=on_step)
    with no_progress_bars():
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    ends = history[:10], history[-10:]
    first, last = (sum(s.loss for s in end) / len(end) for end in ends)
    return SftResult(
        out=str(out),
        steps=len(history),
        num_examples=len(examples),
        first_loss=first,
        last_loss=last,
        skipped_steps=sum(not math.isfinite(s.grad_norm) for s in history),
        seconds=time.monotonic() - start,
    )
