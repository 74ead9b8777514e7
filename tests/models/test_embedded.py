"""The shipped model is what its config and its recipe name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from gspo.data.chat_template import encode_prompt
from gspo.data.datasets import load_rows
from gspo.data.tasks.arithmetic import score
from gspo.models import embedded_path, resolve
from gspo.models.load import load_model, load_tokenizer
from gspo.registry import import_file

FOLDER = embedded_path()
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_embedded_model.py"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return json.loads((FOLDER / "recipe.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("embedded")


def test_the_package_holds_the_model_and_nothing_else() -> None:
    names = {p.name for p in FOLDER.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "recipe.json"}
    expected |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names == expected
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 8_000_000


def test_tensors_are_those_of_the_config(config: dict[str, Any]) -> None:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    expected = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        expected |= {f"{layer}.self_attn.{n}_proj.weight": [hidden, hidden] for n in "qkvo"}
        expected |= {f"{layer}.mlp.{n}_proj.weight": [inner, hidden] for n in ("gate", "up")}
        expected[f"{layer}.mlp.down_proj.weight"] = [hidden, inner]
        expected |= {f"{layer}.{n}_layernorm.weight": [hidden] for n in ("input", "post_attention")}
    with safe_open(str(FOLDER / "model.safetensors"), "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in shapes} == {"F32"}
    assert shapes == expected
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True


def test_weights_are_those_of_the_recipe(config: dict[str, Any], recipe: dict[str, Any]) -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == recipe["sha256"]
    assert {k: config[k] for k in recipe["shape"]} == recipe["shape"]
    model = load_model("embedded")
    assert sum(p.numel() for p in model.parameters()) == recipe["num_parameters"]
    assert 1_000_000 <= recipe["num_parameters"] <= 3_000_000


def test_the_script_still_names_this_recipe(recipe: dict[str, Any]) -> None:
    """The maker's settings are those the shipped weights were made with."""
    import importlib.util
    from pathlib import Path

    file = Path(__file__).parents[2] / "scripts" / "make_embedded_model.py"
    spec = importlib.util.spec_from_file_location("make_embedded_model", file)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert recipe["shape"] == maker.SHAPE
    assert (recipe["seed"], recipe["num_examples"]) == (maker.SEED, maker.NUM_EXAMPLES)
    assert recipe["sft"] == maker.SFT


def test_the_model_starts_low_and_can_reason(recipe: dict[str, Any], tokenizer: Any) -> None:
    """Greedy accuracy is what the recipe says and leaves room; worked-out answers are mostly right."""
    model = load_model("embedded")
    rows = load_rows("arithmetic", "val")
    ids = [list(encode_prompt(row, tokenizer).token_ids) for row in rows]
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = sum(score(text, row.ground_truth) for text, row in zip(texts, rows)) / len(rows)
    assert accuracy == pytest.approx(recipe["held_out_greedy"]["acc"], abs=0.01)
    assert accuracy <= 0.45
    assert recipe["held_out_sampled"]["acc_worked_out"] >= 0.85
    assert 0.2 <= recipe["held_out_sampled"]["worked_out"] <= 0.45


def test_tokenizer_is_the_one_its_script_builds(config: dict[str, Any], tokenizer: Any) -> None:
    script = import_file(SCRIPT)
    built = script.build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    assert len(tokenizer) == config["vocab_size"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config["pad_token_id"], config["eos_token_id"])
    for token in script.SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1


@pytest.mark.parametrize("text", ["23+45=68;75", " two  spaces\n\ttab ", "é日本🙂", "".join(map(chr, range(32, 127)))])
def test_every_text_survives(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>1+1=<assistant>2<eos>"
    shown = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert shown == "<user>1+1=<assistant>"


def test_resolve(tmp_path) -> None:
    assert resolve("embedded") == str(FOLDER)
    assert resolve(tmp_path) == str(tmp_path)
    assert resolve("owner/name") == "owner/name"


def test_it_computes_in_float32() -> None:
    assert {p.dtype for p in load_model("embedded").parameters()} == {torch.float32}
