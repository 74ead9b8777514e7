"""LoRA adapters inside a model's modules (arXiv 2106.09685), by peft: train them, switch them off, merge them.

Adapters are injected in place and the model keeps its class, so the policy, the native engine and the head need no
special case.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.models.four_bit import dequantized, four_bit_layers
from gspo.models.output_head import UnsupportedModel

ADAPTER = "default"
# peft's files use the names of a model wrapped in its classes.
PREFIX = "base_model.model."


class MissingPeft(ImportError):
    """peft is not installed. The message says how to install it."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Which modules get adapters of which rank; updates are multiplied by alpha / rank."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None


class Adapters:
    """The adapters of one model. Base weights are frozen; the adapters start without effect (B = 0)."""

    def __init__(self, model: Any, settings: LoraSettings, *, seed: int) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise MissingPeft(
                "actor_rollout_ref.model.lora_rank needs peft; install it with: pip install 'gspo[lora]'"
            ) from error
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=settings.dropout,
            target_modules=settings.target_modules,
            exclude_modules=settings.exclude_modules,
            task_type="CAUSAL_LM",
            base_model_name_or_path=getattr(model.config, "_name_or_path", None),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(config, model, ADAPTER)
            except ValueError as error:
                raise UnsupportedModel(
                    f"actor_rollout_ref.model.target_modules={settings.target_modules!r} cannot have adapters: "
                    f"{error}. Name linear modules of {type(model).__name__}, or use all-linear"
                ) from error
        self.model = model
        self.config = config
        self._layers = [m for m in model.modules() if isinstance(m, LoraLayer)]

    def state_tensors(self) -> dict[str, Tensor]:
        """The adapters' weights under peft's names."""
        return {
            PREFIX + name.replace(f".{ADAPTER}.", "."): p.detach()
            for name, p in self.model.named_parameters()
            if _is_adapter(name)
        }

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            if _is_adapter(name):
                p.copy_(tensors[PREFIX + name.replace(f".{ADAPTER}.", ".")])

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model computes with its base weights alone."""
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)

    def save_config(self, folder: Path) -> None:
        """Write `adapter_config.json`; peft expects `adapter_model.safetensors` beside it."""
        config = copy.copy(self.config)
        for name in ("target_modules", "exclude_modules", "target_parameters"):
            value = getattr(config, name, None)
            if isinstance(value, set | frozenset):  # whose order differs between processes
                setattr(config, name, sorted(value))
        config.inference_mode = True
        config.save_pretrained(str(folder))

    @contextmanager
    def merged(self) -> Iterator[dict[str, Tensor]]:
        """A context with the tensors of the model without adapters, into which the adapters are added.

        The original weights are kept and copied back: subtracting the adapters would leave rounding errors. Weights in
        4 bits are not touched: the sum is made in new tensors, in the precision in which the layers compute.
        """
        if quantized := four_bit_layers(self.model):
            yield self._merged_copies(quantized)
            return
        own = {n: p for n, p in self.model.named_parameters() if ".base_layer." in n and not _is_adapter(n)}
        kept = {name: p.detach().to("cpu", copy=True) for name, p in own.items()}
        try:
            for layer in self._layers:
                layer.merge()  # pyright: ignore[reportCallIssue]
            yield {
                name.replace("base_layer.", ""): tensor
                for name, tensor in self.model.state_dict().items()
                if not _is_adapter(name)
            }
        finally:
            for layer in self._layers:
                layer.merged_adapters.clear()
            with torch.no_grad():
                for name, p in own.items():
                    p.copy_(kept[name])

    def _merged_copies(self, quantized: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of the model without adapters, where layers of `quantized` have 4-bit weights."""
        plain = {
            name.replace("base_layer.", ""): tensor
            for name, tensor in self.model.state_dict().items()
            if not _is_adapter(name) and not any(name.startswith(f"{layer}.weight") for layer in quantized)
        }
        for name, layer in quantized.items():
            weight, outer = dequantized(layer), self.model.get_submodule(name.removesuffix(".base_layer"))
            if outer in self._layers:
                weight = (weight.float() + outer.get_delta_weight(ADAPTER).float()).to(weight.dtype)
            plain[f"{name.replace('.base_layer', '')}.weight"] = weight
        return plain


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def num_trained(model: Any) -> tuple[int, int]:
    """Number of trained parameters, and of all parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)
