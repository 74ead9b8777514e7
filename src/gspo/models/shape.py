"""The shape of a decoder, dense or mixture of experts, and what follows from it: parameters, operations, bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.models import resolve
from gspo.paths import user_path

UNGATED = {"gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "bloom", "starcoder2"}


class ShapeError(ValueError):
    """A model whose shape is unknown or not supported. The message names the key, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder. With `experts` 0 it is dense; `dense_layers` of a mixture have an ordinary MLP."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Of attention in one layer, with the two norms of the layer."""
        projections = self.hidden * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden
        biases = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        return projections + biases + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """Of one expert in one layer."""
        return self._mlp(self.expert_intermediate)

    @property
    def mlp_width(self) -> int:
        """Width of the MLP for one token; in a mixture, the sum over its experts."""
        if self.experts:
            return self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        return self.intermediate

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def shared_body(self) -> int:
        """Parameters of all layers that every token uses: without experts, embedding and output head."""
        dense = (self.layers - self.sparse_layers) * self._mlp(self.intermediate)
        shared = self._mlp(self.shared_intermediate) + (self.hidden if self.shared_intermediate else 0)
        sparse = self.sparse_layers * (shared + self.hidden * self.experts)
        return self.layers * self.attention_parameters + dense + sparse + self.hidden

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        experts = self.sparse_layers * self.experts * self.expert_parameters
        return self.shared_body + experts + self.head_parameters * (1 if self.tied else 2)

    @property
    def active_body(self) -> int:
        """Parameters of all layers that one token uses."""
        return self.shared_body + self.sparse_layers * self.experts_per_token * self.expert_parameters

    @property
    def active(self) -> int:
        """Parameters that one token uses, with the output head."""
        return self.active_body + self.head_parameters

    @property
    def layer_parameters(self) -> int:
        """Of the largest layer, which FSDP gathers as one unit."""
        if not self.experts:
            return self.attention_parameters + self._mlp(self.intermediate)
        shared = self._mlp(self.shared_intermediate)
        return self.attention_parameters + shared + self.experts * (self.expert_parameters + self.hidden)

    def read_bytes(self, rows: int | float, size: int) -> float:
        """Bytes of weights that a decode step of `rows` rows reads; of a mixture, only experts that some row chose."""
        touched = 0.0
        if self.experts:
            share = 1 - (1 - self.experts_per_token / self.experts) ** max(1.0, rows)
            touched = self.sparse_layers * self.experts * share * self.expert_parameters
        return size * (self.shared_body + touched + self.head_parameters)

    def kv_bytes(self, size: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_size * size

    def kept_bytes(self, size: int) -> float:
        """Bytes per token that one layer keeps for its backward, counted as the layers of transformers keep them.

        Each norm keeps its input, in half precision also in float32. Attention keeps queries, keys, values and its
        result; the MLP keeps four tensors of its width.
        """
        gathered = 2 * self.experts_per_token * self.hidden  # 0 for a dense model
        numbers = 4 * self.mlp_width + 6 * self.hidden + 2 * self.q_size + 2 * self.kv_size + gathered
        return size * (numbers + (2 * self.hidden if size < 4 else 0))

    def attention_operations(self, pairs: float) -> float:
        """Operations of attention in all layers for `pairs` pairs of a token and one it attends to."""
        return 4.0 * self.layers * self.q_size * pairs


def _qwen(name: str, layers: int, hidden: int, wide: int, heads: int, kv: int, vocab: int, tied: bool) -> ModelShape:
    return ModelShape(name, layers, hidden, wide, heads, kv, 128, vocab, tied, qkv_bias=True)


SHAPES: dict[str, ModelShape] = {
    s.name: s
    for s in (
        ModelShape("smol", 30, 576, 1536, 9, 3, 64, 49152, tied=True),
        dataclasses.replace(_qwen("0.5b", 24, 896, 4864, 14, 2, 151936, True), head_dim=64),
        _qwen("1.5b", 28, 1536, 8960, 12, 2, 151936, True),
        _qwen("qwen1.5b", 28, 1536, 8960, 12, 2, 151936, True),
        _qwen("3b", 36, 2048, 11008, 16, 2, 151936, True),
        _qwen("7b", 28, 3584, 18944, 28, 4, 152064, False),
        ModelShape("8b", 32, 4096, 14336, 32, 8, 128, 128256),
        _qwen("14b", 48, 5120, 13824, 40, 8, 152064, False),
        _qwen("32b", 64, 5120, 27648, 40, 8, 152064, False),
        ModelShape("70b", 80, 8192, 28672, 64, 8, 128, 128256),
        _qwen("72b", 80, 8192, 29568, 64, 8, 152064, False),
        ModelShape(
            "30b-a3b", 48, 2048, 6144, 32, 4, 128, 151936, qk_norm=True,
            experts=128, experts_per_token=8, expert_intermediate=768,
        ),
        ModelShape(
            "235b-a22b", 94, 4096, 12288, 64, 4, 128, 151936, qk_norm=True,
            experts=128, experts_per_token=8, expert_intermediate=1536,
        ),
    )
}  # fmt: skip


def shape_of(model: str) -> ModelShape:
    """The shape by name: a known size, `hidden=…,layers=…`, a folder or config.json, or a hub name."""
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    if "=" in model:
        return _from_words(model)
    path = user_path(resolve(model))
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        file = _from_hub(model)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ShapeError(f"{file}: not readable as JSON ({error}); expected a model's config.json") from error
    if not isinstance(config, dict):
        raise ShapeError(f"{file}: expected an object, found {type(config).__name__}")
    config = config.get("text_config") or config
    if config.get("kv_lora_rank"):
        raise ShapeError(
            f"{model}: kv_lora_rank={config['kv_lora_rank']}: multi-head latent attention is not supported"
        )
    return from_config(config, model)


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in a Hugging Face config.json; a missing size is an error that names its key."""

    def need(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or value <= 0:
            raise ShapeError(f"{name}: config.json has {key}={value!r}; expected a positive whole number")
        return value

    kind = str(config.get("model_type", ""))
    hidden, heads = need("hidden_size"), need("num_attention_heads")
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    layers = need("num_hidden_layers")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=int(config.get("intermediate_size") or 4 * hidden),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=need("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", kind in ("gemma", "gemma2", "gemma3_text"))),
        qkv_bias=bool(config.get("attention_bias", kind in ("qwen2", "qwen2_moe"))),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        gated=kind not in UNGATED,
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        expert_intermediate=int(config.get("moe_intermediate_size") or need("intermediate_size")) if experts else 0,
        shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        dense_layers=_dense_layers(config, layers) if experts else 0,
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers of a mixture without experts: listed by number, before the first sparse layer, or between two of them."""
    step = int(config.get("decoder_sparse_step") or 1)
    named = set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0)
    return sum(i in named or i < first or (i + 1) % step != 0 for i in range(layers))


def _from_words(text: str) -> ModelShape:
    """The shape in `hidden=4096,layers=32[,intermediate=…,heads=…,kv_heads=…,head_dim=…,vocab=…,experts=…,…]`."""
    kinds = {f.name: f.type for f in dataclasses.fields(ModelShape) if f.name != "name"}
    given: dict[str, Any] = {}
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        if key not in kinds:
            raise ShapeError(f"--model: unknown size {key!r}; expected some of {', '.join(kinds)}")
        if kinds[key] == "bool" and value.lower() in ("true", "false"):
            given[key] = value.lower() == "true"
        elif kinds[key] == "int" and value.isdigit() and int(value) > 0:
            given[key] = int(value)
        else:
            raise ShapeError(
                f"--model: {key}={value!r}; expected {'true or false' if kinds[key] == 'bool' else 'a positive whole number'}"
            )
    for key in ("hidden", "layers"):
        if key not in given:
            raise ShapeError(f"--model: {text!r} has no {key}; write, for example, hidden=4096,layers=32")
    hidden = given["hidden"]
    head_dim = given.setdefault("head_dim", min(128, hidden))
    given.setdefault("heads", max(1, hidden // head_dim))
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("intermediate", 4 * hidden)
    given.setdefault("vocab", 151936)
    if given.get("experts") and not (given.get("experts_per_token") and given.get("expert_intermediate")):
        raise ShapeError("--model: experts also needs experts_per_token and expert_intermediate")
    return ModelShape(name=text, **given)


def _from_hub(model: str) -> Path:
    """The config.json of a model on the hub, from the cache if it is there."""
    known = f"expected one of {', '.join(SHAPES)}, hidden=…,layers=…, a folder with config.json, or a hub name"
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ShapeError(f"--model {model!r}: no such size, file or folder; {known}")
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ShapeError(f"--model {model!r}: its config.json could not be read ({first}); {known}") from error
