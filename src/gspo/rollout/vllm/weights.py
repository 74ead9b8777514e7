"""What vLLM's worker processes do for us beside generating: load weights in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class WeightLoading:
    """Mixed into vLLM's worker class; `collective_rpc` calls its methods on every worker."""

    model_runner: Any
    reload_weights: Any

    def gspo_load_tensors(self, weights: Mapping[str, Tensor]) -> None:
        """Load tensors that are in this process."""
        self._gspo_load(weights.items())

    def gspo_load_file(self, path: str) -> None:
        """Load a safetensors file, such as one in shared memory, one tensor at a time."""
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cpu") as file:
            self._gspo_load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    @torch.no_grad()
    def _gspo_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.reload_weights(weights_iterator=weights)
        self._gspo_pack_heads()

    def _gspo_pack_heads(self) -> None:
        """Pack tied output layers again on a CPU: they receive no weights by name, so vLLM does not repack them."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
