"""The vLLM engine: groups streamed through vLLM, with the native engine's draws and log-probs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gspo.rollout.counter_noise import sequence_key
from gspo.rollout.engine import GroupRequest, RolloutEngine, check_request, not_finite_error
from gspo.rollout.progress import GroupProgress, SequenceProgress, as_requests, begin
from gspo.rollout.vllm.core import Piece, VllmCore
from gspo.rollout.vllm.settings import VllmSettings
from gspo.types import Group, Rollout

if TYPE_CHECKING:
    from gspo.rollout.workers.worker import EngineSpec


@dataclass(eq=False, slots=True)
class _Open:
    """A response in flight and what it gained since it was queued in vLLM."""

    sequence: SequenceProgress
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def rollout(self, version: int) -> Rollout:
        return self.sequence.extended(self.token_ids, self.log_probs, version)


class VllmEngine(RolloutEngine):
    """A RolloutEngine over vLLM, which runs in this process; a step is `decode_chunk` steps of vLLM.

    Tokens are drawn from uniforms that are a hash of (seed, submission, response, position), as the native engine
    draws them; log-probs are those under logits / temperature, before top-k and top-p. When weights change, responses
    in flight are taken out and queued again with the tokens they have, so each token's version is known.
    """

    def __init__(
        self,
        settings: VllmSettings,
        tokenizer_decode: Callable[[Sequence[int]], str],
        *,
        eos_token_ids: Sequence[int],
        decode_chunk: int = 8,
        version: int = 0,
    ) -> None:
        self._settings = settings
        self._detokenize = tokenizer_decode
        self._eos = tuple(eos_token_ids)
        self._decode_chunk = decode_chunk
        self._version = version
        self._groups: dict[int, GroupProgress] = {}  # by arrival
        self._open: dict[str, _Open] = {}  # by name of the request in vLLM
        self._num_arrivals = self._num_names = 0
        self._asleep = False
        self._core = VllmCore(settings)

    @property
    def num_in_flight(self) -> int:
        return len(self._groups)

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self._settings.max_length)
        group, sequences = self._begin(request)
        self._groups[group.arrival] = group
        self._queue([_Open(sequence) for sequence in sequences])

    def step(self) -> list[Group]:
        self._wake()
        self._advance()
        whole = [g for g in self._groups.values() if g.is_whole]
        for group in whole:
            del self._groups[group.arrival]
        return [g.group() for g in sorted(whole, key=lambda g: (g.request.submission, g.arrival))]

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        for request in requests:
            check_request(request, self._settings.max_length)
        if not requests:
            return []
        self._wake()
        waiting = self._withdraw()
        groups = []
        for request in requests:
            group, sequences = self._begin(request)
            groups.append(group)
            self._queue([_Open(sequence) for sequence in sequences])
        while self._open:
            self._advance()
        self._queue(waiting)
        return [group.group() for group in groups]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make new weights live, in place; None says that they are those the engine has."""
        waiting = self._withdraw()
        for response in waiting:
            response.sequence.begun = response.rollout(self._version)
            response.token_ids, response.log_probs = [], []
        self._version = version
        self._wake()
        if weights is not None:
            self._core.load(weights)
        self._queue(sorted(waiting, key=lambda response: response.sequence.order))

    def unfinished(self) -> list[GroupRequest]:
        unfinished = ((r.sequence, r.rollout(self._version)) for r in self._open.values())
        return as_requests(self._groups.values(), unfinished)

    def clear(self) -> None:
        self._withdraw()
        self._groups.clear()

    def rest(self) -> None:
        """Training is about to use the device: give the cache's memory back until the next step or weights."""
        if self._settings.sleep and not self._asleep:
            waiting = self._withdraw()
            self._core.sleep()
            self._asleep = True
            self._queue(waiting)

    def close(self) -> None:
        self._groups.clear()
        self._open.clear()
        self._core.close()

    def _begin(self, request: GroupRequest) -> tuple[GroupProgress, list[SequenceProgress]]:
        self._num_arrivals += 1
        return begin(request, self._num_arrivals, request.params.stop_tokens(self._eos))

    def _queue(self, responses: Sequence[_Open]) -> None:
        """Give responses to vLLM, in this order, with every token they have; asleep, it gets them when it wakes."""
        for response in responses:
            self._num_names += 1
            name = str(self._num_names)
            self._open[name] = response
            if not self._asleep:
                self._add(name, response)

    def _add(self, name: str, response: _Open) -> None:
        sequence, request = response.sequence, response.sequence.group.request
        self._core.add(
            name,
            (*sequence.context, *response.token_ids),
            request.params,
            key=sequence_key(request.seed, request.submission, sequence.index),
            position=len(sequence.begun.token_ids) + len(response.token_ids),
            stops=sequence.group.stops,
        )

    def _withdraw(self) -> list[_Open]:
        """Take every response out of vLLM; they keep what they have."""
        responses, self._open = self._open, {}
        if not self._asleep:
            self._core.abort(list(responses))
        return list(responses.values())

    def _wake(self) -> None:
        """Take the memory back and go on."""
        if self._asleep:
            waiting = self._withdraw()
            self._core.wake()
            self._asleep = False
            self._queue(waiting)

    def _advance(self) -> None:
        """Up to `decode_chunk` steps of vLLM."""
        for _ in range(self._decode_chunk):
            if not self._open:
                return
            for piece in self._core.step():
                self._take(piece)

    def _take(self, piece: Piece) -> None:
        """Add what a response gained, and close it when it ended."""
        response = self._open[piece.name]
        sequence = response.sequence
        if not math.isfinite(sum(piece.log_probs)) or any(p > 0 for p in piece.log_probs):
            raise not_finite_error(sequence.group.request, sequence.index, self._version)
        response.token_ids.extend(piece.token_ids)
        response.log_probs.extend(piece.log_probs)
        if piece.reason is not None:
            whole = response.rollout(self._version)
            sequence.finish(whole, self._detokenize(whole.token_ids), piece.reason)
            del self._open[piece.name]


def build_vllm(spec: EngineSpec) -> VllmEngine:
    """The engine that a spec of kind `vllm` describes; `spec.options` are further fields of VllmSettings."""
    from gspo.models import resolve
    from gspo.models.load import load_tokenizer

    settings = VllmSettings(
        model=str(resolve(spec.model)),
        num_slots=spec.num_slots,
        max_length=spec.max_length,
        dtype=spec.dtype,
        device=spec.device,
        num_threads=spec.num_threads,
        trust_remote_code=spec.trust_remote_code,
        override_config=spec.override_config,
        **spec.options,
    )
    tokenizer = load_tokenizer(spec.tokenizer, trust_remote_code=spec.trust_remote_code)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    return VllmEngine(settings, decode, eos_token_ids=spec.eos_token_ids)
