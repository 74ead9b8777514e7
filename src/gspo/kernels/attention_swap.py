"""gspo's attention functions in place of those of transformers while a forward runs.

transformers looks up the attention function of a layer by a name in the layer's config. Functions are registered once
(`AttentionInterface.register`); `swapped_attention` changes the names for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from gspo.kernels import UnsupportedModel

_UNSUPPORTED = ("position_bias", "s_aux")


def configs_of(model: nn.Module) -> list[Any]:
    """The config objects that decide the attention of the model's layers, each once."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if getattr(c, "_attn_implementation", None) is not None]


@contextmanager
def swapped_attention(configs: Sequence[Any], names: Mapping[str, str]) -> Iterator[None]:
    """Within this, layers whose config says attention `a` run the function registered as `names[a]`."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = names[config._attn_implementation]
    try:
        yield
    finally:
        for config, name in zip(configs, before):
            config._attn_implementation_internal = name


def refuse_unsupported(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel instead of silently dropping what a layer adds to its attention scores."""
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} passes {name} to attention")
