"""A model's output layer as a function of hidden states: the same float32 logits for the trainer and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gspo.kernels import UnsupportedModel

Multiply = Callable[[Tensor, Tensor], Tensor]  # (hidden [N,H], weight [V,H]) → [N,V]


@dataclass(frozen=True)
class Head:
    """The output layer of one model: float32 logits, then the model's own scale and softcap."""

    linear: nn.Linear
    softcap: float | None = None
    scale: float = 1.0
    multiply: Multiply | None = None  # instead of `wide_linear`

    @staticmethod
    def of(model: Any) -> Head:
        """The head of a `transformers` decoder, checked against the model's own logits on a few tokens."""
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModel(f"{type(model).__name__} has no linear output layer (found {type(linear).__name__})")
        if model.base_model is model:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be trained: transformers gives no access to its decoder without the output "
                "layer (base_model is the whole model); choose a model of another family"
            )
        config = model.config
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # Granite divides
            scale = 1.0 / config.logits_scaling
        elif getattr(config, "logit_scale", None):  # Cohere multiplies
            scale = config.logit_scale
        head = Head(linear, getattr(config, "final_logit_softcapping", None), scale)
        head._verify(model)
        return head

    def logits(self, hidden: Tensor, multiply: Multiply | None = None) -> Tensor:
        """Logits in float32 or wider, never rounded to bf16; `multiply` computes the product in its own precision."""
        out = (multiply or self.multiply or wide_linear)(hidden, self.linear.weight)
        if self.linear.bias is not None:
            out = out + self.linear.bias
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out

    @torch.no_grad()
    def _verify(self, model: Any) -> None:
        ids = torch.arange(4, device=self.linear.weight.device)[None] % self.linear.out_features
        own = model(input_ids=ids, use_cache=False).logits
        if not own.isfinite().all():
            raise UnsupportedModel(
                f"{type(model).__name__}: its logits are not finite; the weights are damaged, or too large for {own.dtype}"
            )
        ours = self.logits(decode_hidden(model, ids)[0])
        worst = (own[0].float() - ours).abs().max().item()
        # The model may round its logits to bf16, whose spacing is 2^-8 of the value.
        size = max(1.0, own.abs().max().item())
        allowed = size * (1e-4 if own.dtype == torch.float32 else 2**-6)
        if not worst <= allowed:
            raise UnsupportedModel(
                f"{type(model).__name__}: logits from its hidden states differ from its own by {worst:.3g}; "
                "its output layer does more than a linear map, a scale and a softcap"
            )


def wide_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [N,H] times weight [V,H], float32 or wider and unrounded.

    A GPU sums products of half-precision numbers in float32 anyway: where no gradient is needed those sums are the
    result, and the weights need not be converted.
    """
    if halves_on_gpu(hidden, weight) and not (torch.is_grad_enabled() and weight.requires_grad):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(wide), weight.to(wide))


def halves_on_gpu(hidden: Tensor, weight: Tensor) -> bool:
    """Whether both are half-precision tensors of the same type on a GPU."""
    return hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)


def decode_hidden(model: Any, input_ids: Tensor) -> Tensor:
    """Final hidden states [b, L, H] of right-padded rows. Causal attention hides the padding, so no mask is needed."""
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
