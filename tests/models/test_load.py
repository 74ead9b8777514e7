"""What must not be loaded is refused, and the attacks are real ones."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo.models import embedded_path
from gspo.models.load import ModelError, check_weights, load_model, load_tokenizer
from tests.faults.data_rows import ATTEMPTS, Attempt, _Canary, _plant_code, try_hostile
from tests.training.models import qwen3_moe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_path(), tmp_path / "m"))


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda a: a.__name__)
def test_hostile_artefacts_are_refused(attempt: Attempt) -> None:
    assert try_hostile(attempt) is None


def test_the_canaries_would_run(tmp_path: Path, folder: Path) -> None:
    """The same artefacts do run code where nothing stands in their way."""
    pickle.loads(pickle.dumps(_Canary(tmp_path / "pickle")))
    assert (tmp_path / "pickle").exists()
    _plant_code(folder, tmp_path / "remote")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoConfig": "evil.C"}, "model_type": "evil"})
    )
    with pytest.raises(Exception):  # noqa: B017 - the planted class is None, so loading fails after it has run
        load_model(str(folder), trust_remote_code=True)
    assert (tmp_path / "remote").exists()


def test_a_sound_folder_loads_to_the_same_weights(folder: Path) -> None:
    ours, packaged = load_model(str(folder)), load_model("embedded")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), packaged.parameters()))


def test_sharded_weights_load(folder: Path) -> None:
    load_model("embedded").save_pretrained(folder / "s", max_shard_size="2MB")
    assert len(check_weights(folder / "s")) >= 2
    assert load_model(str(folder / "s")).num_parameters() == load_model("embedded").num_parameters()
    (next(iter(sorted((folder / "s").glob("model-*.safetensors"))))).unlink()
    with pytest.raises(ModelError, match="is not there"):
        load_model(str(folder / "s"))


def test_a_size_of_layers_that_the_model_has_not_is_accepted(tmp_path: Path) -> None:
    """The dense layers of a mixture of experts without any are wider than every tensor of a small one."""
    model = qwen3_moe()
    model.config.intermediate_size = 6144
    model.save_pretrained(tmp_path)
    assert max(size for shape, _ in check_weights(tmp_path).values() for size in shape) < 6144
    loaded = load_model(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_size_beyond_all_tensors_is_refused_by_name(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    for value, message in (
        (65_536, "have another shape"),
        (65_537, f"{key}=65537, which no tensor of the weights has"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=message):
            load_model(str(folder))


def test_missing_and_mismatched_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder))


@pytest.mark.parametrize("keep", [0, 4, 9, 400, 100_000])
def test_cut_off_weights_are_refused(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(str(folder))


def test_absent_models_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"no config\.json, so it is not a model"):
        load_tokenizer(str(tmp_path))
