"""A small Llama that vLLM can run on a CPU, one engine over it, and a check that no test leaves a process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import make_model

EOS, MAX_LENGTH, SLOTS = 1, 200, 6
TOLERANCE = 1e-4  # of log-probs; the promise is 1e-3
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}


@pytest.fixture(autouse=True, scope="session")
def _with_vllm() -> None:
    pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose logits differ enough that a rounding error does not change a draw."""
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.3, **SHAPE)


def detokenize(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@pytest.fixture(scope="session")
def running(model_folder: Path) -> Iterator[Any]:
    """A VllmEngine for all tests of this process, in which vLLM can start only once."""
    from gspo.rollout.vllm.engine import VllmEngine
    from gspo.rollout.vllm.settings import VllmSettings

    settings = VllmSettings(str(model_folder), SLOTS, MAX_LENGTH, sleep=True)
    engine = VllmEngine(settings, detokenize, eos_token_ids=(EOS,), decode_chunk=2)
    yield engine
    engine.close()


@pytest.fixture
def model(model_folder: Path) -> Any:
    """The engine's model with its first weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


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
