"""A small Llama that vLLM can run on a CPU, and a check that no test leaves a process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_run import make_model

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}


@pytest.fixture(autouse=True, scope="session")
def _with_vllm() -> None:
    pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose logits differ enough that a rounding error does not change a draw."""
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.3, **SHAPE)


@pytest.fixture
def no_process_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def children() -> set[int]:
    """Processes that descend from this one, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found
