"""Exit codes: one module, which the documentation repeats word for word."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gspo
from gspo.checkpoint.folder import CheckpointError
from gspo.checkpoint.resume import ResumeRefused
from gspo.config import load
from gspo.data.rows import DataError
from gspo.distributed.rank_group import RankFailed
from gspo.exit_codes import MEANINGS
from gspo.loop.guards.bad_numbers import BadNumbers
from gspo.loop.guards.stop_request import StopRequest
from gspo.loop.run import EXIT_CODES, exit_code, run_program
from gspo.registry import PluginError
from gspo.rewards.protocol import RewardError
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.connection import WorkersLost
from gspo.sampling.errors import GenerationLimit, RewardFailures, StarvedSampling
from gspo.sampling.step_counts import SamplingCounts

SOURCE = Path(gspo.__file__).parent
DOCS = Path(__file__).parents[1] / "docs" / "exit-codes.md"


def test_the_documented_table_is_that_of_the_program():
    section = DOCS.read_text().partition("## gspo train")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == MEANINGS
    assert len(rows) == len(MEANINGS)


def test_every_code_that_a_run_ends_with_has_a_meaning():
    assert {code for _, code in EXIT_CODES} <= MEANINGS.keys()
    for number in (1, 2, 15):
        stop = StopRequest()
        stop.signal = number
        assert stop.exit_code in MEANINGS


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("rows.jsonl:1", "is broken"), 2),
        (RewardError("no"), 2),
        (ResumeRefused("no"), 2),
        (PluginError("no"), 2),
        (EngineError("no"), 2),
        (StarvedSampling("no", SamplingCounts(0, 1, 1), "all_wrong"), 3),
        (GenerationLimit("no", SamplingCounts(0, 1, 1)), 3),
        (BadNumbers("no"), 4),
        (FloatingPointError("log-probs"), 4),
        (RewardFailures("no", SamplingCounts(0, 1, 1)), 5),
        (CheckpointError("no"), 6),
        (OSError(28, "No space left on device"), 6),
        (OSError("some/model is not a model"), 2),
        (WorkersLost("no"), 8),
        (RankFailed("no"), 8),
        (ZeroDivisionError(), None),  # a defect keeps its traceback
        (ValueError("a bare one"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_code_of_each_error(error, code):
    assert exit_code(error) == code


def test_codes_are_named_in_one_module():
    """No other module has a constant of its own, and no command ends with a bare number."""
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
        if path.name != "exit_codes.py":
            assert not [name for name in own if name.startswith("EXIT_") and name != "EXIT_CODES"], path
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            if ast.unparse(call.func) == "typer.Exit":
                assert not any(isinstance(a, ast.Constant) for a in call.args), path


def test_ctrl_c_before_the_first_step_has_its_code_and_no_traceback(capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    assert run_program(load(), trainer=interrupted) == 130
    assert "stopped at once" in capsys.readouterr().err
