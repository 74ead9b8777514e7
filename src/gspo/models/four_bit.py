"""Linear layers with weights in 4 bits (NF4 of QLoRA, arXiv 2305.14314), by bitsandbytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gspo.models.bitsandbytes_extra import require_bitsandbytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

KEY = "actor_rollout_ref.model.load_in_4bit"


def four_bit_config(dtype: torch.dtype | str) -> Any:
    """What `from_pretrained` needs to quantise linear layers, which then compute in `dtype`. The head stays as it is."""
    from transformers import BitsAndBytesConfig

    require_bitsandbytes(KEY)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def forget_quantizer(model: Any) -> None:
    """Remove what transformers noted about quantisation, so that `save_pretrained` writes an ordinary model."""
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_quantized"):
        if name in model.__dict__:
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with 4-bit weights by name; none of a model that is not quantised."""
    package: Any = sys.modules.get("bitsandbytes")  # not imported: no layer is of its classes
    if package is None:
        return {}
    return {name: m for name, m in model.named_modules() if isinstance(m, package.nn.Linear4bit)}


def keep_differentiable(model: nn.Module) -> None:
    """Keep every 4-bit weight in the layout that has a gradient.

    On processors with bfloat16 instructions bitsandbytes otherwise rearranges the weights of models in evaluation mode,
    for a product that computes in bfloat16 and through which no gradient flows.
    """
    for layer in four_bit_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


def dequantized(layer: Any) -> Tensor:
    """The weight that a 4-bit layer multiplies by, in the precision in which the model was loaded."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
