"""LoRA adapters of a sharded model: gathered module by module and merged into the base weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.training.lora import ADAPTER, Adapters
from gspo.training.parallel import ShardError
from gspo.training.parallel.fsdp import Shards, full

BASE, DOWN, UP = "base_layer.weight", f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight"


class ShardedAdapters:
    """The adapters of a sharded model. Every rank makes the same calls."""

    def __init__(self, adapters: Adapters, shards: Shards) -> None:
        self.adapters, self._shards = adapters, shards
        self._layers = _linear_layers(adapters)

    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model without adapters, with the adapters added, gathered one by one.

        W + B·A·alpha/rank, in the precision of the shards, which do not change.
        """
        held: dict[str, Tensor] = {}  # tensors of a module that is not complete yet
        for name, tensor in self._shards.full_tensors():
            module = next((m for part in (BASE, DOWN, UP) if (m := _module_of(name, part)) in self._layers), None)
            if module is None:
                yield name.replace("base_layer.", ""), tensor
                continue
            held[name.removeprefix(f"{module}.")] = tensor
            if len(held) == 3:
                layer = self._layers[module]
                change = held[UP] @ held[DOWN] * layer.scaling[ADAPTER]
                yield f"{module}.weight", held[BASE] + (change.T if layer.fan_in_fan_out else change)
                held.clear()
        assert not held, f"adapters without the weights they belong to: {sorted(held)}"

    def save(self, folder: Path) -> None:
        """Write the full adapters in peft's format, from rank 0."""
        from safetensors.torch import save_file

        state = {name: full(tensor) for name, tensor in self.adapters.state_tensors().items()}
        if self._shards.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self.adapters.save_config(folder)
            whole = {name: tensor.to("cpu").contiguous() for name, tensor in state.items()}
            save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _linear_layers(adapters: Adapters) -> dict[str, Any]:
    """The modules with adapters by name; only untied linear layers are supported."""
    from peft.tuners.lora import Linear, LoraLayer

    found = {name: m for name, m in adapters.model.named_modules() if isinstance(m, LoraLayer)}
    ties = getattr(adapters.model.config.get_text_config(), "tie_word_embeddings", False)
    tied = set(getattr(adapters.model, "_tied_weights_keys", None) or ()) if ties else set()
    for name, layer in found.items():
        if not isinstance(layer, Linear) or f"{name}.weight" in tied:
            raise ShardError(
                f"actor_rollout_ref.model.target_modules gives adapters to {name}, which is "
                f"{'tied to another weight' if isinstance(layer, Linear) else 'no linear layer'}: on several ranks only "
                "untied linear layers can have adapters; name others, use all-linear, or train in one process "
                "(actor.strategy=local, trainer.backend=local)"
            )
    return found


def _module_of(name: str, part: str) -> str | None:
    """The name of the module whose `part` is tensor `name`; None for other tensors."""
    return name.removesuffix(f".{part}") if name.endswith(f".{part}") else None
