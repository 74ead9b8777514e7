"""An evaluation that fails loses no finished step, and one over odd accuracies does not fail."""

from __future__ import annotations

import pytest

from gspo.loop.callbacks import Callback
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.loop.runs import rows, train
from tests.support.small_run import config, even_first_byte, final_state, make_model

SETTINGS = ("trainer.save_freq=-1", "trainer.test_freq=2")


class FailsAt(Callback):
    """A callback that raises in the evaluation of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluate(self, trainer, step, evaluation) -> None:
        if step == self.step:
            raise RuntimeError("the evaluation broke")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("step", [2, 4], ids=["within the run", "at its end"])
def test_the_step_before_a_failed_evaluation_is_saved_and_goes_on(tmp_path, model, step):
    train(tmp_path / "whole", model, *SETTINGS)
    settings = config(tmp_path / "broken", model, *SETTINGS)
    trainer = Trainer(settings, reward_fn=even_first_byte, console=Console(enabled=False), callbacks=[FailsAt(step)])
    with pytest.raises(Exception, match="the evaluation broke"):
        trainer.fit()
    run = tmp_path / "broken" / "run"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{step:06d}"]
    assert [row["step"] for row in rows(tmp_path / "broken")] == list(range(1, step + 1))
    train(tmp_path / "broken", model, *SETTINGS)
    whole, again = final_state(tmp_path / "whole" / "run"), final_state(run)
    assert again["weights"] == whole["weights"] and again["state"] == whole["state"]


def test_accuracies_outside_0_to_1_are_evaluated(tmp_path, model):
    def plus_or_minus(data_source, solution_str, ground_truth, extra_info=None):
        right = 1.0 if solution_str and ord(solution_str[0]) % 2 == 0 else -1.0
        return {"score": right, "acc": right}

    words = ("reward_model.reward_manager=dapo", "trainer.test_freq=1", "trainer.total_training_steps=2")
    result = train(tmp_path, model, *words, reward=plus_or_minus)
    assert result["steps"] == 2 and result["final_ci"] is None and -1 <= result["final_acc"] <= 1


def test_rewards_that_fail_in_an_evaluation_are_said(tmp_path, model, capsys):
    resolved = config(tmp_path, model, "trainer.total_training_steps=1", "trainer.val_before_train=false")
    held_out = set()

    def odd(prompt, response):
        if prompt.uid in held_out:
            raise ValueError("no answer sheet")
        return even_first_byte(prompt, response)

    trainer = Trainer(resolved, reward_fn=even_first_byte, val_reward_fn=odd, console=Console())
    prompts = trainer.parts.evaluator.prompts
    held_out.update(prompt.uid for prompt in prompts[1:])
    trainer.fit()
    said = " ".join(capsys.readouterr().out.split())
    count = f"{len(prompts) - 1} of {len(prompts)}"
    assert f"step 1: {count} rewards of the evaluation failed and its accuracy leaves them out" in said
    assert "no answer sheet" in said
