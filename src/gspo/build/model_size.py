"""The sizes of a model that memory depends on, measured on its modules instead of estimated from its shape."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gspo.models.output_head import decode_hidden
from gspo.models.shape import ModelShape, from_config
from gspo.plan.memory import ModelSize

PROBE_ROWS, PROBE_LENGTH = 2, 48
MAX_LAYER_PARAMETERS = 400_000_000  # a larger layer is not built only to be measured


def measure_size(config: Any, dtype: torch.dtype, name: str, lora_rank: int = 0) -> ModelSize:
    """Number of parameters, of trained ones among them, and bytes kept for the backward, for a transformers config."""
    shape = _shape(config, name)
    parameters, trained = _count_parameters(config, lora_rank)
    estimate = ModelSize.of(shape, torch.finfo(dtype).bits // 8)
    per_layer, beside = _measure_kept(config, dtype) or (estimate.layer_kept, estimate.other_kept)
    return ModelSize(shape, parameters, trained, per_layer, beside)


def _shape(config: Any, name: str) -> ModelShape:
    """The sizes in a transformers config, also of models that use other names for them."""
    text = config.get_text_config()
    return from_config(text.to_dict() | {key: getattr(text, key, None) for key in text.attribute_map}, name)


def _count_parameters(config: Any, lora_rank: int) -> tuple[int, int]:
    """(all parameters, trained parameters), counted on a model without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    if not lora_rank:
        return total, total
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapters = sum(lora_rank * (m.in_features + m.out_features) for m in linear)
    return total + adapters, adapters


def _measure_kept(config: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """Bytes per token that a forward keeps for its backward: (in each layer, beside the layers).

    From the tensors that copies of the model with one and two layers save; None when a layer is too large to build, or
    when the model is none that can be trained, which is said when it is loaded.
    """
    one, two = (_shallow(config, layers, dtype) for layers in (1, 2))
    if one is None or two is None:
        return None
    try:
        first, second = (_saved_bytes(model) / (PROBE_ROWS * PROBE_LENGTH) for model in (one, two))
    except (AttributeError, TypeError):
        return None
    return second - first, max(0.0, 2 * first - second)


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
    """Bytes of the storages saved for a backward, each counted once, without the parameters."""
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
