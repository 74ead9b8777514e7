"""The native engine: rollouts from the trainer's own modules and tensors, in process, without a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo.rollout.decoder import Decoder
from gspo.rollout.engine import GroupRequest
from gspo.rollout.pool import SlotPool
from gspo.types import Group


class NativeEngine:
    """A RolloutEngine over any transformers decoder.

    `num_slots` responses run at once, each of at most `max_length` tokens with its prompt; a step decodes
    `decode_chunk` tokens. For the same calls it gives the same bits. Tokens are its whole state after
    `load_weights`: it then forgets every cache and takes its groups up again from their tokens, exactly as a fresh
    engine would that is given `unfinished()`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer_decode: Callable[[Sequence[int]], str],
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        num_slots: int,
        max_length: int,
        decode_chunk: int = 8,
        device: torch.device | str = "cpu",
        version: int = 0,
    ) -> None:
        for name, value in (
            ("num_slots", num_slots),
            ("max_length", max_length),
            ("decode_chunk", decode_chunk),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        self._decoder = Decoder(model, pad_token_id, max_length, torch.device(device))
        self._max_length = max_length
        self._decode_chunk = decode_chunk
        self._version = version
        self._num_slots = num_slots
        self._new_pool = partial(
            SlotPool, self._decoder, tokenizer_decode, eos_token_ids, max_length=max_length
        )
        self._pool: SlotPool = self._new_pool(num_slots=num_slots)

    @property
    def num_in_flight(self) -> int:
        return self._pool.num_groups

    def submit(self, request: GroupRequest) -> None:
        self._check(request)
        self._pool.submit(request)

    def step(self) -> list[Group]:
        return self._pool.advance(self._decode_chunk, self._version)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        for request in requests:
            self._check(request)
        if not requests:
            return []
        num_responses = sum(request.n for request in requests)
        pool = self._new_pool(num_slots=min(self._num_slots, num_responses))
        progress = [pool.submit(request) for request in requests]
        while pool.num_groups:
            pool.advance(self._decode_chunk, self._version)
        return [p.group() for p in progress]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make new weights live. `None` says that the modules themselves have changed; tensors are copied into them."""
        if weights is not None:
            copy_weights(weights, self._decoder.model)
        self._pool.rewind(self._version)
        self._version = version

    def unfinished(self) -> list[GroupRequest]:
        return self._pool.unfinished(self._version)

    def clear(self) -> None:
        self._pool.clear()

    def close(self) -> None:
        self._pool.clear()

    def _check(self, request: GroupRequest) -> None:
        """Refuse a request that cannot run, by the prompt's name."""
        params, num_prompt = request.params, len(request.prompt.token_ids)
        where = f"prompt {request.prompt.uid!r}"
        if not num_prompt:
            raise ValueError(f"{where}: no tokens; a prompt needs at least one")
        if request.n < 1 or params.max_tokens < 1:
            raise ValueError(
                f"{where}: n={request.n}, max_tokens={params.max_tokens}; both must be at least 1"
            )
        if params.temperature < 0 or not 0 < params.top_p <= 1:
            raise ValueError(
                f"{where}: temperature={params.temperature}, top_p={params.top_p}; expected temperature >= 0 and "
                "0 < top_p <= 1"
            )
        if num_prompt + params.max_tokens > self._max_length:
            raise ValueError(
                f"{where}: {num_prompt} prompt tokens and max_tokens={params.max_tokens} exceed the engine's "
                f"max_length={self._max_length}; lower data.max_prompt_length or filter over-long prompts"
            )


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], model: Any) -> None:
    """Copy named tensors over the model's own, in place; an unknown name or another shape is refused."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in weights.items():
        if name not in own:
            raise KeyError(f"weights hold {name!r}, which the engine's model does not have")
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"weights {name!r}: shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
            )
        own[name].copy_(tensor)
