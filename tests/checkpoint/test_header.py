"""The headers of safetensors files and the state of a checkpoint, read without trust, at the edges of what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import Stored, find_problem, read_header
from gspo.untrusted import Unreadable
from tests.support.small_checkpoint import STATE, save


def tensor(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(file: Path, header: Any, num_bytes: int, length: int | None = None) -> Path:
    text = json.dumps(header).encode()
    announced = len(text) if length is None else length
    file.write_bytes(announced.to_bytes(8, "little") + text + b"\0" * num_bytes)
    return file


def test_a_header_has_the_shapes_and_types_of_every_tensor(tmp_path):
    kinds = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
    tensors = {f"t{name}": torch.zeros(2, 3).to(dtype) for name, dtype in kinds.items()}
    save_file({**tensors, "none": torch.zeros(0, 4), "one": torch.tensor(1.0)}, tmp_path / "all", metadata={"a": "b"})
    expected = {f"t{name}": Stored((2, 3), name) for name in kinds}
    assert read_header(tmp_path / "all") == {**expected, "none": Stored((0, 4), "F32"), "one": Stored((), "F32")}


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"])
def test_a_tensor_needs_the_bytes_of_its_type(tmp_path, name):
    width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}.get(name, 1)
    whole = write(tmp_path / "whole", {"a": tensor(0, 3 * width, (3,), name)}, 3 * width)
    assert read_header(whole) == {"a": Stored((3,), name)}
    with pytest.raises(Unreadable, match="not where its shape ends"):
        read_header(write(tmp_path / "short", {"a": tensor(0, 3 * width - 1, (3,), name)}, 3 * width - 1))


@pytest.mark.parametrize(
    ("header", "num_bytes", "problem"),
    [
        ({"b": tensor(8, 16), "a": tensor(0, 8)}, 16, None),  # in any order
        ({}, 0, None),
        ({"a": tensor(0, 2, dtype="F8_E4M3")}, 2, None),  # another type has at least a byte per value
        ({"a": tensor(0, 1, dtype="F8_E4M3")}, 1, "not where its shape ends"),
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "'b' at bytes 4 to 12"),
        ({"a": tensor(0, 8), "b": tensor(9, 17)}, 17, "'b' at bytes 9 to 17"),
        ({"a": tensor(1, 9)}, 9, "'a' at bytes 1 to 9"),
        ({"a": tensor(0, 8), "b": tensor(8, 4, (0,))}, 8, "'b' at bytes 8 to 4"),
        ({"a": tensor(0, 8)}, 9, "end at byte 8 of 9"),
        ({"a": tensor(0, 8)}, 7, "end at byte 8 of 7"),
        ({"a": tensor(0, True, (1,))}, 1, "'a' is not a tensor"),
        ({"a": tensor(-8, 0)}, 0, "'a' is not a tensor"),
        ({"a": tensor(0, 8, (-1, -2))}, 8, "'a' is not a tensor"),
        ({"a": tensor(0, 8, dtype=32)}, 8, "'a' is not a tensor"),
        ({"a": {"shape": [], "dtype": "F32"}}, 0, "'a' is not a tensor"),
        ({"a": {**tensor(0, 8), "data_offsets": [0, 4, 8]}}, 8, "'a' is not a tensor"),
        ([], 0, "has no safetensors header"),
    ],
)
def test_tensors_must_be_exactly_the_content_of_the_file(tmp_path, header, num_bytes, problem):
    file = write(tmp_path / "file", header, num_bytes)
    if problem is None:
        assert set(read_header(file)) == set(header)
        return
    with pytest.raises(Unreadable, match=problem):
        read_header(file)


def test_a_header_is_not_longer_than_its_file(tmp_path):
    with pytest.raises(Unreadable, match="announces a header of 3 bytes in a file of 10"):
        read_header(write(tmp_path / "a", {}, 0, length=3))
    (tmp_path / "b").write_bytes(b"\0" * 7)
    with pytest.raises(Unreadable, match="announces a header of 0 bytes in a file of 7"):
        read_header(tmp_path / "b")


def problem_of(path: Path, **changes: Any) -> str | None:
    """What is wrong with a checkpoint of step 3 with this state; None removes a key."""
    state = {**STATE, "format": 1, "step": 3, **changes}
    kept = {key: value for key, value in state.items() if value is not None}
    (path / "training" / "state.json").write_text(json.dumps(kept))
    return find_problem(path, {"model.safetensors": None})


def test_the_state_of_a_run_on_rollouts_or_on_examples_has_its_mappings_and_counters(tmp_path):
    path = save(tmp_path, 3)
    assert problem_of(path) is None
    for name in STATE:
        assert problem_of(path, **{name: None}) == f"training/state.json has no mapping {name!r}"
        assert problem_of(path, **{name: [1]}) == f"training/state.json has no mapping {name!r}"
    assert problem_of(path, examples={}, sampler=None, objective=None) is None
    assert problem_of(path, examples=[]) == "training/state.json has no mapping 'examples'"
    for value in (0, 7, 2.5):
        assert problem_of(path, counters={"seconds": value}) is None
    for value in (True, -1, -0.5, float("inf"), float("nan"), "1", [1]):
        found = problem_of(path, counters={"rollbacks": 1, "seconds": value})
        assert found is not None and f"counters.seconds={value!r}" in found


def test_a_step_is_a_number_within_its_limits_that_the_folder_may_name(tmp_path):
    path = save(tmp_path, 3)
    assert problem_of(path, step=4) == "training/state.json has step 4, but the folder is named step-000003"
    path = path.rename(tmp_path / "mine")
    for step in (0, 4, 10**9):
        assert problem_of(path, step=step) is None
    for step in (-1, 10**9 + 1, 2.0, True):
        assert f"has step {step!r}, expected a whole number from 0 to 1,000,000,000" in problem_of(path, step=step)
    assert problem_of(path, format=2) == "training/state.json has format 2, this version reads 1"
    (path / "config.json").unlink()
    assert problem_of(path) == "config.json is missing"


@pytest.mark.parametrize(
    ("index", "files", "problem"),
    [
        ({"weight_map": {"a": "one", "b": "two"}}, ("one", "two"), None),
        ({"weight_map": {"a": "one", "b": "two"}}, ("one",), "names 'two', which is not in the manifest"),
        ({"weight_map": {}}, ("one",), "has no weight_map"),
        ({"weight_map": ["one"]}, ("one",), "has no weight_map"),
        (["one"], ("one",), "has no weight_map"),
    ],
)
def test_weights_in_several_files_are_all_in_the_manifest(tmp_path, index, files, problem):
    path, name = save(tmp_path, 3), "model.safetensors.index.json"
    (path / name).write_text(json.dumps(index))
    found = find_problem(path, dict.fromkeys([name, *files]))
    assert found == (problem and f"{name} {problem}")
    assert find_problem(path, {"one": None}) == "model.safetensors is not in the manifest"
    assert checkpoint.verify(path) is None  # the index of no file in the manifest is not read
