"""A run whose layers are compiled, stopped and resumed in a new process, is the run that was never stopped, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.kernels.compiled_layers import has_cpp_compiler
from tests.support.small_run import final_state, make_model

# Two threads: how compiled code shares a sum among them depends on the sizes it was compiled for. A KL term, so that a
# frozen reference is compiled too.
SETTINGS = ("trainer.num_threads=2", "data.max_response_length=24", "actor_rollout_ref.actor.use_kl_loss=true")
PROGRAM = """
import sys
from pathlib import Path
from torch._dynamo.utils import counters
from tests.loop.runs import trainer

t = trainer(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[4:])
assert t.parts.engine.description == "padded cache, compiled"
assert t.parts.policy.runner.layers is not None
assert t.parts.roles.reference.scorer.runner.layers is not None
made, step = counters["stats"]["unique_graphs"], t.train_step

def stopping():
    step()
    if t.step >= int(sys.argv[3]):
        t.stop.signal = 15

t.train_step = stopping
t.fit()
assert counters["stats"]["unique_graphs"] == made, "a batch was compiled for after the start"
"""


def train(folder: Path, model: Path, cache: Path, stop_after: int) -> None:
    """Run in a new process, with or without compiled code from an earlier one in `cache`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(model), str(stop_after), *SETTINGS],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
def test_a_stopped_run_goes_on_to_the_same_bits_with_code_compiled_anew(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    model = make_model(tmp_path / "model", **shape)
    train(tmp_path / "whole", model, tmp_path / "first", stop_after=4)
    train(tmp_path / "halves", model, tmp_path / "first", stop_after=2)
    train(tmp_path / "halves", model, tmp_path / "second", stop_after=4)
    assert final_state(tmp_path / "halves" / "run") == final_state(tmp_path / "whole" / "run")
