"""Log-probs and entropy of chosen tokens from hidden states, without ever holding [tokens, vocab] logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Logits of one chunk: at most this many float32 numbers (64 MiB).
CHUNK_ELEMENTS = 1 << 24
# Log-probs of all chunks that are kept for the backward rather than computed again (256 MiB).
KEEP_ELEMENTS = 1 << 26


class UnsupportedModel(ValueError):
    """The model's output head is not one we can reproduce chunk by chunk."""


@dataclass(frozen=True)
class Head:
    """The model's output layer as a function of hidden states: float32 logits, then softcap or scale as it does."""

    linear: nn.Linear
    softcap: float | None = None
    scale: float = 1.0

    @staticmethod
    def of(model: Any) -> Head:
        """The head of a `transformers` decoder, checked against the model's own logits on a few tokens."""
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModel(
                f"{type(model).__name__} has no linear output layer (found {type(linear).__name__})"
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 or wider; low-precision weights are raised first, so that no logit is rounded to bf16."""
        bias, wide = self.linear.bias, torch.promote_types(hidden.dtype, torch.float32)
        out = F.linear(hidden.to(wide), self.linear.weight.to(wide), None if bias is None else bias.to(wide))
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
        ours = self.logits(decode_hidden(model, ids))
        worst = (own.float() - ours).abs().max().item()
        # The model's own logits may be rounded to bf16, whose spacing is 2^-8 of the value.
        size = max(1.0, own.abs().max().item())
        allowed = size * (1e-4 if own.dtype == torch.float32 else 2**-6)
        if not worst <= allowed:
            raise UnsupportedModel(
                f"{type(model).__name__}: logits from its hidden states differ from its own by {worst:.3g}; "
                "its output layer does more than a linear map, a scale and a softcap"
            )


def decode_hidden(model: Any, input_ids: Tensor) -> Tensor:
    """Final hidden states [b, L, H] of right-padded rows. Causality alone keeps padding out, so no mask is built."""
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state


def chosen_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_grad: bool = True,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Float32 log-probs [N] of `targets` [N] given `hidden` [N,H], and the entropies [N] when asked.

    Chunks are a function of sizes only, so scoring and training see the same arithmetic, bit for bit. With
    `recompute`, or when there are many, logits are not kept for the backward but computed again.
    """
    chunk = max(1, CHUNK_ELEMENTS // head.linear.out_features)
    recompute |= hidden.shape[0] * head.linear.out_features > KEEP_ELEMENTS
    recompute &= torch.is_grad_enabled()
    if hidden.shape[0] <= chunk and not recompute:
        return _chunk(head, hidden, targets, temperature, entropy, entropy_grad)
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        piece = (head, hidden[part], targets[part], temperature, entropy, entropy_grad)
        parts.append(checkpoint(_chunk, *piece, use_reentrant=False) if recompute else _chunk(*piece))
    log_probs = torch.cat([p[0] for p in parts])
    return log_probs, torch.cat([p[1] for p in parts if p[1] is not None]) if entropy else None


def _chunk(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head.logits(hidden)
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    if not entropy:
        return chosen, None
    if not entropy_grad:  # only looked at: nothing of it is kept for the backward
        log_probs = log_probs.detach()
    return chosen, -(log_probs.exp() * log_probs).sum(-1)
