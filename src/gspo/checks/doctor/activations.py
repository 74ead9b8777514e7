"""What a forward keeps for its backward, counted on a copy of the model with one and two layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from gspo.training.log_probs import decode_hidden

PROBE_ROWS, PROBE_LENGTH = 2, 48
MAX_LAYER_PARAMETERS = 400_000_000  # a larger layer is not built only to be measured
FORMULA_FACTOR = 34  # bytes a token, layer and hidden unit at 2 bytes a number (arXiv 2205.05198, without attention scores)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes a token that a forward with gradients keeps: in each layer, and beside the layers."""

    per_layer: float
    beside: float


def measure_activations(config: Any, dtype: torch.dtype) -> Activations:
    """Count the tensors saved for the backward by one- and two-layer models of this shape, in this precision."""
    one, two = (_shallow(config, layers, dtype) for layers in (1, 2))
    if two is None or one is None:
        size = torch.finfo(dtype).bits // 8
        return Activations(FORMULA_FACTOR / 2 * size * config.hidden_size, 2.0 * size * config.hidden_size)
    first, second = _saved_bytes(one), _saved_bytes(two)
    tokens = PROBE_ROWS * PROBE_LENGTH
    layer = (second - first) / tokens
    return Activations(layer, max(0.0, first / tokens - layer))


def _shallow(config: Any, num_layers: int, dtype: torch.dtype) -> Any | None:
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers = num_layers
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:num_layers]
    small.vocab_size = 64
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(small, name, 0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(small).parameters())
    if size > num_layers * MAX_LAYER_PARAMETERS:
        return None
    state = torch.get_rng_state()
    try:
        return AutoModelForCausalLM.from_config(small, dtype=dtype).eval()
    finally:
        torch.set_rng_state(state)


def _saved_bytes(model: Any) -> int:
    """Bytes of the storages kept for a backward, each once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            seen[pointer] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.randint(0, 64, (PROBE_ROWS, PROBE_LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decode_hidden(model, ids)
    return sum(seen.values())
