"""`gspo validate` passes on this build and fails on a sabotaged one, naming what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from gspo.algo import losses, ratios
from gspo.checks import training
from gspo.checks import validate as run
from gspo.checks.check import Check
from gspo.checks.validate import ALL_EARNED, EARNED, main, validate
from gspo.cli import app
from gspo.sampling import dynamic
from gspo.sampling.filters import Verdict
from gspo.types import LossOutput


def failures(**options) -> set[str]:
    return {c.name for c in validate(log=lambda text: None, **options) if not c.passed}


def test_the_technical_part_holds_and_says_so(capsys):
    assert main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert EARNED["technical"] in said and ALL_EARNED not in said and "FAILED" not in said


def test_json_lists_every_check(capsys):
    assert main(["--quick", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"] and len(facts["checks"]) >= 12
    assert all(c["part"] == "technical" and c["detail"] for c in facts["checks"])


def _ratio_of_one(monkeypatch):
    monkeypatch.setattr(
        ratios,
        "sequence_ratio",
        lambda log_ratio, mask: torch.ones_like(log_ratio[:, :1]) + 0 * log_ratio.sum(-1, keepdim=True),
    )


def _wrong_sign(monkeypatch):
    honest = losses.POLICY_LOSSES.get("gspo").formula

    def upside_down(x, s):
        out = honest(x, s)
        return LossOutput(-out.loss, out.metrics)

    object.__setattr__(losses.POLICY_LOSSES.get("gspo"), "formula", upside_down)


def _token_ratio(monkeypatch):
    honest = losses.importance_ratio
    monkeypatch.setattr(
        losses, "importance_ratio", lambda level, x: honest("token" if level == "sequence" else level, x)
    )


def _no_length_normalisation(monkeypatch):
    monkeypatch.setattr(ratios, "mean_log_ratio", lambda log_ratio, mask: log_ratio.sum(-1, keepdim=True))


def _filter_off(monkeypatch):
    monkeypatch.setattr(dynamic, "judge", lambda group, metric="seq_reward", enable=True: Verdict(True, "kept", group))


@pytest.fixture
def restored():
    """Put the registered loss back as it was."""
    entry = losses.POLICY_LOSSES.get("gspo")
    formula = entry.formula
    yield
    object.__setattr__(entry, "formula", formula)


@pytest.mark.parametrize(
    ("sabotage", "must_name"),
    [
        (_ratio_of_one, {"golden numbers", "gradient formula", "clipping"}),
        (_wrong_sign, {"golden numbers", "gradient formula", "sign of the update"}),
        (_token_ratio, {"golden numbers", "gradient formula", "GSPO = GSPO-token"}),
        (_no_length_normalisation, {"golden numbers", "gradient formula", "length normalisation"}),
        (_filter_off, {"dynamic sampling, stream", "dynamic sampling, rounds"}),
    ],
)
def test_each_sabotage_is_caught_by_name(monkeypatch, restored, sabotage, must_name, capsys):
    sabotage(monkeypatch)
    assert must_name <= failures(quick=True)
    assert main([]) == 1  # and no training is started on a loss that is wrong
    said = capsys.readouterr().out
    assert EARNED["technical"] not in said and ALL_EARNED not in said
    assert "FAILED: " in said and min(must_name) in said


def test_the_command_exits_with_the_verdict(monkeypatch):
    assert CliRunner().invoke(app, ["validate", "--quick"]).exit_code == 0
    _filter_off(monkeypatch)
    assert CliRunner().invoke(app, ["validate", "--quick"]).exit_code == 1


def test_a_check_that_raises_has_failed_with_its_error():
    (check,) = run.run_checks("technical", {"broken": lambda: 1 / 0})
    assert check == Check("technical", "broken", False, "ZeroDivisionError: division by zero")


def short_run(tmp_path, **changes) -> training.ShortRun:
    """Rows as a healthy training of six steps leaves them, with some columns changed."""
    accuracies = changes.pop("acc", [0.3, 0.8])
    columns = {
        "actor/grad_norm": [0.1] * 6,
        "actor/seq_importance_ratio/mb0": [1.0] * 6,
        "actor/pg_clipfrac/mb0": [0.0] * 6,
        "actor/seq_importance_ratio/min": [0.99] * 6,
        "actor/seq_importance_ratio/max": [1.01] * 6,
        "actor/pg_clipfrac_later": [0.15] * 6,
        "critic/score_all/mean": [0.3, 0.3, 0.4, 0.4, 0.5, 0.6],
        **{name: [0.91, 0.92, 0.93, 0.94, 0.95, 0.96] for name in training.NAMES},
        **changes,
    }
    rows = [{"step": i, **{name: values[i] for name, values in columns.items()}} for i in range(6)]
    folder = training.RunFolder(tmp_path)
    return training.ShortRun(folder, rows, [{"val-core/a/acc/mean@1": a} for a in accuracies])


@pytest.mark.parametrize(
    ("changes", "part", "name"),
    [
        ({"actor/seq_importance_ratio/mb0": [1.0] * 5 + [1.0001]}, "dynamics", "first mini-batch"),
        (
            {"actor/seq_importance_ratio/min": [1.0] * 6, "actor/seq_importance_ratio/max": [1.0] * 6},
            "dynamics",
            "later mini-batches",
        ),
        ({"actor/seq_importance_ratio/max": [30.0] * 6}, "dynamics", "ratios"),
        ({"actor/seq_importance_ratio": [0.7, 1.0, 1.0, 1.0, 1.0, 1.0]}, "dynamics", "ratios"),
        ({"actor/pg_clipfrac_later": [0.0] * 6}, "dynamics", "clip fraction"),
        ({"actor/pg_clipfrac_lower": [0.2] * 6}, "dynamics", "metrics vary"),
        ({"acc": [0.3, 0.32]}, "improvement", "held-out accuracy"),
        ({"critic/score_all/mean": [0.5] * 6}, "improvement", "training reward"),
    ],
)
def test_a_training_that_misbehaves_fails_its_check(tmp_path, changes, part, name):
    check = {"dynamics": training.DYNAMICS, "improvement": training.IMPROVEMENT}[part][name]
    assert check(short_run(tmp_path))[0]
    assert not check(short_run(tmp_path, **changes))[0]


def test_clip_ranges_must_order_the_clip_fraction(tmp_path):
    def verdict(*shares: float) -> bool:
        runs = {
            f: short_run(tmp_path, **{"actor/pg_clipfrac_later": [s] * 6}) for f, s in zip((0.1, 1.0, 30.0), shares)
        }
        return training.CLIP_RANGES["clip ranges"](runs)[0]

    assert verdict(0.6, 0.2, 0.0)
    assert not verdict(0.2, 0.6, 0.0) and not verdict(0.6, 0.5, 0.4)


@pytest.mark.slow
def test_all_of_it_on_this_machine(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert [line for line in EARNED.values() if line not in said] == [] and ALL_EARNED in said
