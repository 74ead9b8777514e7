"""Callbacks: errors name the callback, its state is restored, and a step that was trained is not lost."""

from __future__ import annotations

import pytest

import gspo
from gspo.loop.callbacks import open_callbacks
from gspo.loop.trainer import Trainer
from gspo.registry import PluginError
from gspo.runs.console import Console
from tests.support.small_run import config, even_first_byte, make_model


class Count(gspo.Callback):
    """Counts the steps it has seen, and raises after `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.count, self.limit = 0, limit

    def on_step_end(self, trainer, step, metrics):
        self.count += 1
        if self.count == self.limit:
            raise KeyError("my_metric")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Other(gspo.Callback):
    def __init__(self, state=None) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def make_trainer(folder, model, *callbacks):
    settings = config(folder, model, "trainer.total_training_steps=3", "trainer.save_freq=-1")
    return Trainer(settings, even_first_byte, callbacks=callbacks, console=Console(enabled=False))


def test_a_step_whose_callback_raises_is_saved_and_counted_once(tmp_path, model):
    with pytest.raises(
        PluginError, match=r"callback Count: on_step_end raised KeyError: 'my_metric' \(.*test_callbacks"
    ):
        make_trainer(tmp_path, model, Count(limit=2)).fit()
    count = Count()
    trainer = make_trainer(tmp_path, model, Other(), count)
    assert (trainer.step, count.count) == (2, 2)
    assert trainer.fit()["steps"] == count.count == 3
    assert [row["step"] for row in trainer.run.rows()] == [0, 1, 2, 3]


def test_states_go_to_their_class_whatever_the_order():
    before = open_callbacks((), [Count(), Other({"a": 1}), Other({"a": 2}), Other({})])
    before.members[0].count = 7
    assert before.state_dict() == {"Count": {"count": 7}, "Other": {"a": 1}, "Other-2": {"a": 2}}
    after = open_callbacks((), [Other(), Count(), Other()])
    after.load_state_dict(before.state_dict())
    first, count, second = after.members
    assert (first.state, count.count, second.state) == ({"a": 1}, 7, {"a": 2})
    after.load_state_dict({"1": {"count": 9}})  # of an older checkpoint
    assert (first.state, count.count, second.state) == ({"a": 1}, 9, {"a": 2})


@pytest.mark.parametrize("state", [{"a": {1, 2}}, 5, {"a": object()}])
def test_a_state_that_is_not_json_is_refused_by_the_name_of_its_callback(state):
    with pytest.raises(PluginError, match="callback Other: state_dict, which must return plain JSON, raised TypeError"):
        open_callbacks((), [Other(state)]).state_dict()


def test_what_is_no_callback_is_refused():
    for wrong in (Count, None, object()):
        with pytest.raises(PluginError, match=r"trainer\.callbacks: .* derived from gspo\.Callback"):
            open_callbacks((), [wrong])
    with pytest.raises(PluginError, match=r"trainer\.callbacks: builtins:dict raised|is not an instance"):
        open_callbacks(["builtins:dict"])
    with pytest.raises(PluginError, match=r"trainer\.callbacks: builtins:memoryview raised TypeError"):
        open_callbacks(["builtins:memoryview"])
