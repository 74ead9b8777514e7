"""benchmarks/vs_vllm.py: both engines answer the same prompts, and the figures are those of the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vs_vllm.py"
NEW = 12


def _compare(model: Path, *options: str) -> dict[str, Any]:
    """The JSON line of a comparison on the embedded task, with the vLLM of this interpreter."""
    words = [sys.executable, str(SCRIPT), str(model), "--data", "arithmetic", "--plen", "64", "--new", str(NEW)]
    words += ["--prompts", "6", "--runs", "2", "--vllm-python", sys.executable]
    quick = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "distributed_executor_backend": "uni"}
    words += ["--vllm-args", json.dumps(quick), *options, "trainer.num_threads=1"]
    one_process = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=one_process)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_greedy_answers_of_both_engines_are_the_same(model_folder: Path) -> None:
    figures = _compare(model_folder, "--temperature", "0", "--group", "4")
    assert figures["group"] == 1  # greedy: more than one answer would be copies
    assert figures["equal"] == 1.0
    for name in ("answer_tokens", "ended"):
        assert figures["native"][name] == figures["vllm"][name]


def test_sampled_answers_of_both_engines_have_the_same_lengths(model_folder: Path) -> None:
    """384 answers by each, drawn with fixed seeds: random, but equally distributed."""
    figures = _compare(model_folder, "--group", "32", "--logprobs")
    assert "equal" not in figures
    native, vllm = figures["native"], figures["vllm"]
    assert native["ended"] == pytest.approx(vllm["ended"], abs=0.1)
    assert native["answer_tokens"] == pytest.approx(vllm["answer_tokens"], abs=1.0)
    assert 1 <= native["answer_tokens"] <= NEW
    assert len(native["runs_s"]) == len(vllm["runs_s"]) == 2  # the warm-up is not among them
    assert figures["ratio"] == pytest.approx(native["tok_per_s"] / vllm["tok_per_s"], abs=1e-3)
