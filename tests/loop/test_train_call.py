"""What `gspo.train` trains: the config in each of its forms, with overrides."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.config import ConfigErrors, ResolvedConfig, TrainerConfig, load
from gspo.loop import run

SEED, EPOCHS = "trainer.seed=3", "trainer.total_epochs=2"


@pytest.fixture
def trained(monkeypatch) -> list[tuple[ResolvedConfig, dict[str, Any]]]:
    found: list[tuple[ResolvedConfig, dict[str, Any]]] = []

    class Recorded:
        def __init__(self, resolved: ResolvedConfig, **options: Any) -> None:
            found.append((resolved, options))

        def fit(self) -> dict[str, Any]:
            return {"steps": len(found)}

    monkeypatch.setattr(run, "Trainer", Recorded)
    return found


def test_every_form_of_a_config_is_trained_as_it_would_be_loaded(trained, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("trainer: {seed: 3}\n")
    assigned = TrainerConfig()
    assigned.trainer.seed = 3
    forms = [file, str(file), assigned, {"trainer": {"seed": 3}}, {"trainer.seed": 3}, load(None, [SEED])]
    for form in forms:
        run.train(form, [EPOCHS])
        assert trained[-1][0].to_dict() == load(None, [SEED, EPOCHS]).to_dict()
        run.train(form)
        assert trained[-1][0].to_dict() == load(None, [SEED]).to_dict()
    resolved = load("gsm8k", [SEED])
    run.train(resolved)
    assert trained[-1][0] is resolved
    for form in ("gsm8k", load("gsm8k")):  # a recipe stays where keys are added
        run.train(form, [SEED, EPOCHS])
        assert trained[-1][0].to_dict() == load("gsm8k", [SEED, EPOCHS]).to_dict()
    assert run.train() == {"steps": len(trained)} and trained[-1][0].to_dict() == load().to_dict()


def test_options_reach_the_trainer_and_a_wrong_override_is_raised(trained):
    run.train(None, [SEED], reward_fn=len, tokenizer="t")
    assert trained[-1][1] == {"reward_fn": len, "tokenizer": "t"}
    with pytest.raises(ConfigErrors, match=r"trainer\.seeed"):
        run.train(load(), ["trainer.seeed=3"])
