"""`actor.shuffle` draws the groups of each mini-batch: another run, and a resumed one is the same to the bit."""

from __future__ import annotations

import pytest

from gspo.build.role_settings import order_seed
from gspo.checkpoint.resume import ResumeRefused
from gspo.config import load
from tests.loop.runs import rows, train
from tests.support.small_run import final_state, make_model

SHUFFLE = "actor_rollout_ref.actor.shuffle=true"
WORDS = ("actor_rollout_ref.actor.ppo_epochs=2", "trainer.total_training_steps=3")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("shuffled")
    train(folder, model, *WORDS, SHUFFLE)
    return folder


def test_the_order_is_drawn_by_seed_and_step_and_only_when_asked_for():
    config = load(overrides=[SHUFFLE]).config
    assert len({order_seed(config, step) for step in range(5)}) == 5
    assert order_seed(config, 2) == order_seed(load(overrides=[SHUFFLE]).config, 2)
    assert order_seed(config, 2) != order_seed(load(overrides=[SHUFFLE, "trainer.seed=1"]).config, 2)
    assert order_seed(load().config, 2) is None


def test_a_resumed_run_is_the_whole_run_to_the_bit(tmp_path, model, shuffled):
    train(tmp_path, model, *WORDS, SHUFFLE, stop_after=1)
    train(tmp_path, model, *WORDS, SHUFFLE)
    assert final_state(tmp_path / "run") == final_state(shuffled / "run")


def test_it_is_another_run_than_one_in_the_sampled_order(tmp_path, model, shuffled):
    train(tmp_path, model, *WORDS)
    assert final_state(tmp_path / "run")["weights"] != final_state(shuffled / "run")["weights"]
    first = rows(tmp_path)[0], rows(shuffled)[0]
    assert first[0]["critic/score/mean"] == first[1]["critic/score/mean"]  # the same groups were trained on
    for row in first:
        assert row["actor/seq_importance_ratio/mb0"] == 1.0


def test_it_may_not_change_on_resume(tmp_path, model):
    train(tmp_path, model, stop_after=1)
    with pytest.raises(ResumeRefused, match=r"actor\.shuffle: False in the checkpoint, True now"):
        train(tmp_path, model, SHUFFLE)
