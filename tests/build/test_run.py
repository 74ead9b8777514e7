"""Keys that choose data, rewards and plugins reach what they name."""

from __future__ import annotations

import json

import pytest

from gspo.build.data.training_data import load_prompts
from gspo.data.rows import DataError
from gspo.loop.trainer import Trainer
from gspo.registry import PluginError
from gspo.rewards import RewardError
from gspo.runs.console import Console
from tests.support.small_run import config, even_first_byte


def open_trainer(folder, model, *overrides, reward=None):
    trainer = Trainer(config(folder, model, *overrides), reward_fn=reward, console=Console(enabled=False))
    trainer.close()
    return trainer


def first_prompt(trainer):
    return load_prompts(trainer.config, trainer.parts.tokenizer, "train")[0]


def test_columns_and_system_prompt_of_a_file(tmp_path, model):
    data = tmp_path / "rows.jsonl"
    rows = [{"q": f"{i}+1=", "gold": {"value": i + 1}, "kind": "arithmetic"} for i in range(8)]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    trainer = open_trainer(
        tmp_path,
        model,
        f"data.train_files={data}",
        "data.val_files=null",
        "data.num_train_samples=null",
        "data.prompt_key=q",
        "data.ground_truth_key=gold.value",
        "data.data_source_key=kind",
        "data.system_prompt=Add.",
        "data.shuffle=false",
        reward=even_first_byte,
    )
    prompt = first_prompt(trainer)
    assert [m["content"] for m in prompt.messages] == ["Add.", "0+1="]
    assert (prompt.ground_truth, prompt.data_source) == (1, "arithmetic")
    assert trainer.parts.evaluator is None  # a file has no held-out part of its own


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_an_unknown_dataset_is_named_with_its_key(tmp_path, model, key):
    with pytest.raises(DataError, match=rf"^{key}=arithmetik: is not a dataset.*did you mean 'arithmetic'"):
        open_trainer(tmp_path, model, f"{key}=arithmetik")


def test_a_broken_row_is_named_by_file_and_line(tmp_path, model):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": 7, "ground_truth": "2"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: field 'prompt'"):
        open_trainer(tmp_path, model, f"data.train_files={data}", reward=even_first_byte)


def test_weighted_reward_functions_add_up(tmp_path, model):
    module = tmp_path / "two.py"
    module.write_text("def one(prompt, response):\n    return 1.0\n\n\ndef half(prompt, response):\n    return 0.5\n")
    functions = [{"path": str(module), "name": "one"}, {"path": str(module), "name": "half", "weight": 4.0}]
    trainer = Trainer(
        config(tmp_path, model, f"reward.functions={json.dumps(functions)}", "algorithm.filter_groups.enable=false"),
        console=Console(enabled=False),
    )
    trainer.train_step()
    row = list(trainer.run.rows())[-1]
    trainer.close()
    assert row["critic/score/mean"] == pytest.approx(3.0)


def test_a_filter_metric_that_the_reward_lacks_is_found_at_the_start(tmp_path, model):
    with pytest.raises(RewardError, match=r"filter_groups\.metric='style'.*acc"):
        open_trainer(tmp_path, model, "algorithm.filter_groups.metric=style", reward=even_first_byte)


def test_a_plugin_registers_a_loss(tmp_path, model):
    plugin = tmp_path / "my_losses.py"
    plugin.write_text(
        "from gspo.algo import policy_loss\nfrom gspo.algo.losses import gspo\n\n\n"
        "@policy_loss('mine', clip_low=0.1, clip_high=0.1, aggregation='seq-mean-token-mean', levels=('sequence',))\n"
        "def mine(x, settings):\n    return gspo(x, settings)\n"
    )
    trainer = open_trainer(
        tmp_path,
        model,
        f"trainer.plugins=[{plugin}]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
        reward=even_first_byte,
    )
    assert trainer.parts.objective.loss_mode == "mine"
    with pytest.raises(PluginError, match=r"trainer\.plugins.*nowhere"):
        open_trainer(tmp_path, model, "trainer.plugins=[nowhere.py]", reward=even_first_byte)


def test_code_tests_that_cannot_grade_and_text_that_is_none_are_named_at_the_start(tmp_path, model):
    data = tmp_path / "rows.jsonl"
    good = {"prompt": "p", "data_source": "code", "ground_truth": {"inputs": ["1"], "outputs": ["1"]}}
    for row, problem in (
        ({**good, "ground_truth": {"inputs": ["1"], "outputs": []}}, r"rows\.jsonl:2: field 'ground_truth'"),
        ({**good, "prompt": "\ud800"}, r"rows\.jsonl:2: field 'prompt'"),
    ):
        data.write_text("".join(json.dumps(r) + "\n" for r in (good, row)))
        with pytest.raises(DataError, match=problem):
            open_trainer(tmp_path, model, f"data.train_files={data}", "data.train_batch_size=2")


def test_what_was_started_ends_when_a_later_part_cannot_be_built(tmp_path, model, monkeypatch):
    ended = []
    monkeypatch.setattr("gspo.rollout.native.engine.NativeEngine.close", lambda self: ended.append("engine"))

    def broken(*args):
        raise DataError("data", "no fingerprint")

    monkeypatch.setattr("gspo.build.run.fingerprint", broken)
    with pytest.raises(DataError, match="no fingerprint"):
        open_trainer(tmp_path, model, reward=even_first_byte)
    assert ended == ["engine"]


def test_an_empty_dataset_is_named_as_it_was_passed(tmp_path, model):
    with pytest.raises(DataError, match=r"train_dataset: has no rows"):
        Trainer(config(tmp_path, model), even_first_byte, train_dataset=[], console=Console(enabled=False))


def test_a_group_filter_that_would_be_ignored_is_refused(tmp_path, model):
    cases = [
        (3, [], "group_filter is of type int"),
        (bool, ["algorithm.filter_groups.function=builtins:bool"], "function='builtins:bool' is set; choose one"),
        (bool, ["algorithm.filter_groups.enable=false"], r"no effect without algorithm\.filter_groups\.enable=true"),
    ]
    for keep, overrides, message in cases:
        settings = config(tmp_path, model, *overrides)
        with pytest.raises(PluginError, match=message):
            Trainer(settings, even_first_byte, group_filter=keep, console=Console(enabled=False))


def test_a_group_filter_needs_no_metric_of_the_reward(tmp_path, model):
    trainer = Trainer(
        config(tmp_path, model, "algorithm.filter_groups.metric=acc"),
        lambda prompt, response: float(len(response) % 2),
        group_filter=lambda group: True,
        console=Console(enabled=False),
    )
    trainer.train_step()
    trainer.close()
    assert trainer.step == 1


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"])
def test_a_name_that_no_plugin_registered_is_refused_before_the_weights_are_loaded(tmp_path, model, monkeypatch, key):
    monkeypatch.setattr("gspo.build.run.build_models", None)
    with pytest.raises(PluginError, match=rf"{key.rpartition('.')[2]}='nobody' is unknown"):
        open_trainer(tmp_path, model, "trainer.plugins=[json]", f"{key}=nobody", reward=even_first_byte)
