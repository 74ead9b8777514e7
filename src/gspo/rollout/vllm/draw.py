"""How vLLM draws tokens: by the native engine's rule, inside vLLM's sampler.

vLLM's log-probs are either those before the temperature or those after top-k and top-p, and its random numbers depend
on how often a response was interrupted. Training needs log_softmax(logits / temperature), and random numbers that are a
hash of (seed, submission, response, position). So a request is sent as a greedy one that carries its real parameters.
This processor draws the token and leaves one finite number in the row of logits: the token's log-prob. vLLM's argmax
finds the token, and its `processed_logits` mode reports that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from gspo.rollout.counter_noise import uniform
from gspo.rollout.engine import SamplingParams
from gspo.rollout.token_sampling import RowSampling, choose

# Stands for a log-prob that is not finite: no real log-prob is above 0.
NOT_FINITE = 1.0
_EXTRA = "gspo"


def pack_draw(params: SamplingParams, key: int, position: int) -> dict[str, Any]:
    """The extra arguments of a vLLM request whose tokens are drawn here; `position` is that of its first token."""
    return {_EXTRA: [key, position, params.temperature, params.top_k, params.top_p]}


@dataclass(slots=True)
class _Row:
    """One response of the batch; `output` is vLLM's list of the tokens drawn since it was queued."""

    key: int
    start: int
    params: SamplingParams
    output: Sequence[int]


class CounterSampling(LogitsProcessor):
    """Replaces each row of logits by its draw: the log-prob at the drawn token, -inf everywhere else."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = torch.device(device)
        self._rows: dict[int, _Row] = {}
        self._changed = True

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self._changed |= process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:  # a trial run of vLLM
            return logits
        rows = [self._rows[i] for i in range(logits.shape[0])]
        if self._changed:
            self._sampling = RowSampling.of([row.params for row in rows], self._device)
            self._keys = torch.tensor([row.key for row in rows], device=self._device)
            self._changed = False
        positions = torch.tensor([row.start + len(row.output) for row in rows], device=self._device)
        draws = None if self._sampling.all_greedy else uniform(self._keys, positions)
        token, log_prob = choose(logits, self._sampling, draws)
        log_prob = log_prob.where(log_prob.isfinite(), NOT_FINITE)
        return logits.fill_(-torch.inf).scatter_(1, token[:, None], log_prob[:, None].to(logits.dtype))


def _row(params: Any, prompt: list[int] | None, output: list[int]) -> _Row | None:
    """The row of a request that was added to the batch."""
    packed = (params.extra_args or {}).get(_EXTRA)
    if packed is None:
        return None
    key, start, temperature, top_k, top_p = packed
    return _Row(key, start, SamplingParams(params.max_tokens, temperature, top_k, top_p), output)
