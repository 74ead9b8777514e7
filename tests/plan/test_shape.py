"""Parameters, bytes and operations of a decoder against transformers' own models and by hand."""

from __future__ import annotations

import json

import pytest

from gspo.models.shape import SHAPES, ShapeError, from_config, shape_of


def count(config) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def small(kind: str, **more):
    import transformers

    base = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    return getattr(transformers, kind)(**{**base, **more})


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LlamaConfig", {"tie_word_embeddings": True}),
        ("LlamaConfig", {"tie_word_embeddings": False, "head_dim": 16}),
        ("Qwen2Config", {"tie_word_embeddings": False}),
        ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 8}),
        ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "Qwen3MoeConfig",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1], "head_dim": 8},
        ),
        (
            "Qwen2MoeConfig",
            {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 40,
            },
        ),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_real_model(kind, more):
    config = small(kind, **more)
    assert from_config(config.to_dict(), kind).parameters == count(config)


def test_parameters_by_hand(shape):
    assert shape.parameters == 2 * 656 + 8 + 80
    assert shape.active_body == 2 * 656 + 8
    assert shape.kv_bytes(2) == 2 * 2 * 8 * 2  # keys and values, two layers, eight numbers, two bytes


@pytest.mark.parametrize(
    ("name", "billions"), [("1.5b", 1.544), ("7b", 7.616), ("8b", 8.030), ("32b", 32.76), ("235b-a22b", 235.1)]
)
def test_known_sizes_have_their_published_parameters(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_mixture_multiplies_with_few_and_reads_more_as_the_batch_grows():
    mixture = SHAPES["30b-a3b"]
    assert mixture.active < mixture.parameters / 8
    read = [mixture.read_bytes(rows, 2) for rows in (1, 8, 64, 4096)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(2 * mixture.active)
    assert read[-1] == pytest.approx(
        2 * (mixture.parameters - mixture.head_parameters), rel=1e-6
    )  # the input embedding is not read


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("intermediate", [80, 256])
def test_what_a_layer_keeps_is_what_a_real_forward_keeps(dtype, intermediate):
    import torch

    from gspo.build.model_size import measure_size

    config = small("LlamaConfig", hidden_size=64, intermediate_size=intermediate)
    measured = measure_size(config, getattr(torch, dtype), "x").layer_kept
    predicted = from_config(config.to_dict(), "x").kept_bytes(2 if dtype == "bfloat16" else 4)
    assert predicted == pytest.approx(measured, rel=0.05)


def test_a_shape_is_found_by_name_words_folder_and_file(tmp_path):
    assert shape_of("7B") is SHAPES["7b"]
    words = shape_of("hidden=4096,layers=32,intermediate=14336,kv_heads=8,vocab=128256")
    assert words.parameters == SHAPES["8b"].parameters
    config = small("LlamaConfig").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)).parameters == shape_of(str(tmp_path / "config.json")).parameters
    assert shape_of("embedded").hidden == 144


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("nine", "nine"),
        ("hidden=64", "layers"),
        ("hidden=64,layers=x", "layers='x'"),
        ("hidden=64,layers=2,depth=3", "depth"),
        ("hidden=64,layers=2,experts=4", "experts_per_token"),
    ],
)
def test_a_bad_shape_is_refused_by_name(model, named):
    with pytest.raises(ShapeError, match=named):
        shape_of(model)


def test_a_config_without_a_size_names_the_key(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}')
    with pytest.raises(ShapeError, match="num_hidden_layers"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    with pytest.raises(ShapeError, match="kv_lora_rank"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ShapeError, match="expected an object"):
        shape_of(str(tmp_path))
