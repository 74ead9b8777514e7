"""One registry for every kind of plugin: a name belongs to one implementation, and a file may be imported twice."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from gspo.data.datasets import DATASETS
from gspo.plugins import import_plugins
from gspo.registry import PluginError, Registry, import_file, user_code
from gspo.rewards import RewardError, RewardSpec, reward
from gspo.rewards.builtin import REWARDS
from gspo.rewards.functions import load_function
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.worker import ENGINES


def execute(path: Path, name: str):
    """Run a file as a module of that name, as every import of a file by its path does."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_unknown_name_suggests_the_nearest():
    table: Registry[int] = Registry("loss_mode", error=KeyError)
    table.add("vanilla", 1)
    table.add("gspo", 2)
    assert (table.get("gspo"), table.names(), list(table.items())) == (2, ("vanilla", "gspo"), [1, 2])
    with pytest.raises(KeyError, match=r"loss_mode='gsqo' is unknown: did you mean 'gspo'\? known names are v"):
        table.get("gsqo")


def test_a_second_implementation_of_a_name_is_refused_and_the_first_named():
    table: Registry[object] = Registry("reward")

    def first():
        pass

    table.add("mine", first)
    table.add("mine", first)
    with pytest.raises(ValueError, match=rf"reward='mine' is already registered in {__file__}, line \d+; choose"):
        table.add("mine", lambda: None)
    assert table.get("mine") is first


def test_a_file_that_is_imported_again_replaces_what_it_registered(tmp_path):
    table: Registry[object] = Registry("reward")
    file = tmp_path / "mine.py"
    file.write_text("def score():\n    return 1\n\n\ndef other():\n    return 2\n")
    once, again = (execute(file, name) for name in ("plugin_mine", "user_mine"))
    table.add("mine", [once.score], source=once.score)
    table.add("mine", [again.score], source=again.score)
    assert table.get("mine") == [again.score] != [once.score]
    with pytest.raises(ValueError, match="already registered"):
        table.add("mine", [again.other], source=again.other)


def test_a_class_is_found_by_its_place_as_a_function_is(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    table: Registry[type] = Registry("trainer.logger")
    file = tmp_path / "sinks_of_a_plugin.py"
    file.write_text("\nclass Mine:\n    pass\n\n\nclass Other:\n    pass\n")
    once, again = import_file(file), importlib.import_module("sinks_of_a_plugin")
    table.add("mine", once.Mine)
    table.add("mine", again.Mine)
    assert table.get("mine") is again.Mine is not once.Mine
    with pytest.raises(PluginError, match=r"already registered in .*sinks_of_a_plugin\.py, line 2; choose"):
        table.add("mine", again.Other)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("value = 3\n", "value", "is of type int; expected a function or a class"),
        ("value = 3\n", "valeu", "cannot be imported: AttributeError: .*valeu"),
        ("raise RuntimeError('no licence')\n", "f", "cannot be imported: RuntimeError: no licence"),
        ("def f(:\n", "f", "cannot be imported: SyntaxError"),
        ("raise SystemExit(7)\n", "f", "cannot be imported: SystemExit: 7"),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused_by_key_and_name(tmp_path, monkeypatch, source, name, message):
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "module_of_a_reference", raising=False)
    (tmp_path / "module_of_a_reference.py").write_text(source)
    importlib.invalidate_caches()
    with pytest.raises(PluginError, match=rf"trainer\.callbacks='module_of_a_reference:{name}' {message}"):
        Registry("trainer.callbacks").find(f"module_of_a_reference:{name}")


@pytest.mark.parametrize("name", ["", ":", ":f", "no_such_module:f", "nobody"])
def test_a_name_that_means_nothing_is_refused(name):
    with pytest.raises(PluginError, match=rf"trainer\.logger='{name}' "):
        Registry("trainer.logger").find(name)


def test_an_exception_of_the_users_code_is_named_with_its_line():
    with (
        pytest.raises(
            PluginError, match=rf"callback Mine: on_save raised KeyError: 'x' \({__file__}, line \d+\)"
        ) as found,
        user_code("callback Mine: on_save"),
    ):
        {}["x"]
    assert isinstance(found.value.__cause__, KeyError)
    with pytest.raises(EngineError, match=r"^of gspo$"), user_code("callback Mine: on_save"):
        raise EngineError("of gspo")


def test_a_plugin_that_exits_is_refused(tmp_path):
    (tmp_path / "leaving.py").write_text("import sys\n\nsys.exit(7)\n")
    with pytest.raises(PluginError, match=r"trainer\.plugins names .*leaving\.py.*SystemExit: 7"):
        import_plugins([str(tmp_path / "leaving.py")])


def test_lazy_built_ins_are_imported_when_asked_for():
    table: Registry[object] = Registry("engine", {"text": "json:dumps", "broken": "no_such_module:f"})
    assert table.get("text")([1]) == "[1]" and "broken" in table and list(table.items()) == []
    with pytest.raises(ModuleNotFoundError):
        table.get("broken")
    with pytest.raises(ValueError, match="already registered; choose"):
        table.add("text", print)


def test_the_programs_own_tables_refuse_a_second_name():
    with pytest.raises(RewardError, match=r"reward='exact' is already registered in .*builtin\.py"):
        reward("exact")(lambda prompt, response: 1.0)
    with pytest.raises(ValueError, match="dataset='arithmetic' is already registered"):
        DATASETS.add("arithmetic", lambda split, *, limit, seed: [])
    with pytest.raises(EngineError, match=r"rollout\.name='vlm' is unknown: did you mean 'vllm'\?"):
        ENGINES.get("vlm")


def test_a_plugin_may_also_be_the_file_of_the_reward_function(tmp_path, monkeypatch):
    monkeypatch.setattr(REWARDS, "_items", dict(REWARDS._items))
    file = tmp_path / "rewards_of_a_plugin.py"
    file.write_text(
        "from gspo.rewards import reward\n\n\n@reward('of_a_plugin')\ndef score(prompt, response):\n    return 1.0\n"
    )
    import_plugins([str(file)])
    for _ in range(2):  # for training and for evaluation
        load_function(RewardSpec("score", path=str(file)))
    assert "of_a_plugin" in REWARDS


def test_files_of_the_same_name_in_two_folders_are_both_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(DATASETS, "_items", dict(DATASETS._items))
    files = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "my_data.py")
        files[-1].write_text(
            f"from gspo.data.datasets import dataset\n\n\n@dataset('{folder}')\n"
            f"def load(split, *, limit, seed):\n    return ['{folder}']\n"
        )
    import_plugins([str(file) for file in files])
    rows = [DATASETS.get(name)("train", limit=None, seed=0) for name in ("here", "there")]
    assert rows == [["here"], ["there"]]


def test_a_file_is_imported_once_and_sees_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "neighbour_of_a_plugin.py").write_text("VALUE = 3\n")
    file = tmp_path / "counted.py"
    file.write_text("from neighbour_of_a_plugin import VALUE\n")
    module = import_file(file)
    monkeypatch.chdir(tmp_path)
    assert module.VALUE == 3 and import_file("counted.py") is module


def test_a_file_that_cannot_be_imported_is_tried_again(tmp_path):
    file = tmp_path / "half_written.py"
    file.write_text("value = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_file(file)
    file.write_text("value = 1\n")
    assert import_file(file).value == 1
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py"):
        import_file(tmp_path / "nowhere.py")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ImportError, match=r"notes\.txt is not a Python file"):
        import_file(tmp_path / "notes.txt")
