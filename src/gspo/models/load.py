"""Loading a model and its tokenizer: safetensors only, and no code from the folder unless it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo.models import resolve

if TYPE_CHECKING:
    import torch


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name ("embedded" for the packaged one)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)


def load_model(
    path: str,
    *,
    dtype: torch.dtype | str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """The decoder of a folder or hub name. Weights in a pickle are refused, whatever they hold."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        resolve(path), dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    return model.to(device)
