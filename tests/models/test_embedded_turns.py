"""The second shipped model, of turns, is what its recipe names, and both together are small."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from gspo.models import EMBEDDED, embedded_path, resolve
from gspo.models.load import load_model, load_tokenizer
from gspo.registry import import_file

FOLDER = embedded_path("embedded-turns")
SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_weights_and_settings_are_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    maker = import_file(SCRIPTS / "make_turns_model.py")
    sys.modules.pop("make_embedded_model", None)
    recipe = json.loads((FOLDER / "recipe.json").read_text())
    assert hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest() == recipe["sha256"]
    assert recipe["shape"] == maker.SHAPE and recipe["sft"] == maker.SFT and recipe["seed"] == maker.SEED
    assert recipe["data"] == {"calculator": maker.NUM_SUMS, "guess": maker.NUM_GAMES}
    assert sum(p.numel() for p in load_model("embedded-turns").parameters()) == recipe["num_parameters"]


def test_it_has_the_tokenizer_of_the_other_one() -> None:
    one, other = (load_tokenizer(name) for name in EMBEDDED)
    assert one.get_vocab() == other.get_vocab() and one.chat_template == other.chat_template
    assert resolve("embedded-turns") == str(FOLDER)


def test_both_are_small() -> None:
    assert sum(file.stat().st_size for name in EMBEDDED for file in embedded_path(name).iterdir()) < 8_000_000
