"""Which environment a name, a path or a file of tools means, and what is said when it means none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gspo.environments import loading
from gspo.environments.builtin import Guess, PythonTool
from gspo.environments.loading import ENVIRONMENTS, EnvironmentSpec, environment, find_named, load_environment
from gspo.environments.protocol import Action, EnvironmentProblem, ToolCall
from gspo.environments.tools import ToolEnvironment
from gspo.environments.verl import BaseTool, ToolResponse, VerlTools, as_schema, mark_tool, standing_in, tool_functions
from gspo.types import Prompt

ONE = """
from gspo.environments import Step
from gspo.environments.builtin import Guess  # not of this file

class Counter:
    def __init__(self, start=0):
        self.start = start
    def reset(self, prompt, seed):
        return ()
    def step(self, action):
        return Step(reward=float(self.start))

class Board: ...  # no environment

def helper(): ...
"""
TOOLS = """
from os.path import join

def _hidden(): ...

def shout(text: str) -> str:
    return text.upper()

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_registered_name_is_made_with_its_arguments() -> None:
    made = load_environment(EnvironmentSpec("guess", kwargs={"high": 3, "guesses": 2}))()
    assert isinstance(made, Guess) and (made._high, made._guesses, made._cost) == (3, 2, 0.05)
    assert find_named(EnvironmentSpec("gsm8k")) is find_named(EnvironmentSpec("python")) is PythonTool
    with pytest.raises(EnvironmentProblem, match=r"environment\.name"):
        load_environment(EnvironmentSpec("gues"))


def test_every_episode_has_an_environment_of_its_own_and_a_list_is_tools() -> None:
    make = load_environment(EnvironmentSpec("guess"))
    assert make() is not make()

    def shout(text: str) -> str:
        return text.upper()

    tools = load_environment(EnvironmentSpec(made=[shout], kwargs={"ignored": 1}))()
    assert [tool["function"]["name"] for tool in tools.tools] == ["shout"]
    made = load_environment(EnvironmentSpec("guess", made=lambda high: Guess(high=high + 1), kwargs={"high": 5}))()
    assert isinstance(made, Guess) and made._high == 6, "what this process has made comes before names"


def test_a_single_object_is_refused_since_episodes_would_share_it(file: Any) -> None:
    expected = r"is a single object of type {}; every episode needs one of its own: name a class, or a function"
    with pytest.raises(EnvironmentProblem, match="environment 'Guess' " + expected.format("Guess")):
        load_environment(EnvironmentSpec(made=Guess()))
    with pytest.raises(EnvironmentProblem, match="environment 'one' " + expected.format("Counter")):
        load_environment(EnvironmentSpec("one", path=file(ONE + "\none = Counter(2)\n")))


def test_plugins_are_imported_before_a_name_is_looked_up(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_items", "_sources"):  # what is registered here goes again
        monkeypatch.setattr(ENVIRONMENTS, table, dict(getattr(ENVIRONMENTS, table)))
    path = file(ONE + "\nimport gspo\ngspo.environment('counter')(Counter)\n")
    made = load_environment(EnvironmentSpec("counter", plugins=(path,), kwargs={"start": 4}))()
    assert made.step(Action("")).reward == 4.0
    assert environment("counter_two")(Guess) is Guess and find_named(EnvironmentSpec("counter_two")) is Guess


def test_a_scheme_has_the_rest_of_the_name_as_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    class Far(Guess):
        """A far one."""

        def __init__(self, place: str, speed: int = 1) -> None:
            super().__init__()
            self.place, self.speed = place, speed

    monkeypatch.setitem(loading.SCHEMES, "far", "somewhere:Far")
    monkeypatch.setattr(loading, "import_name", lambda name: {"somewhere:Far": Far}[name])
    made: Any = load_environment(EnvironmentSpec("far:http://a:8/b", kwargs={"speed": 3}))()
    assert (made.place, made.speed) == ("http://a:8/b", 3)
    assert find_named(EnvironmentSpec("far:x")).__doc__ == "A far one."
    with pytest.raises(EnvironmentProblem):
        load_environment(EnvironmentSpec("near:x"))
    with pytest.raises(EnvironmentProblem):
        load_environment(EnvironmentSpec("far"))


def test_the_only_class_of_a_file_is_its_environment(file: Any) -> None:
    made = load_environment(EnvironmentSpec(path=file(ONE), kwargs={"start": 2}))()
    assert made.step(Action("")).reward == 2.0
    two = file(ONE + "\nclass Other(Counter): ...\n", "two.py")
    with pytest.raises(
        EnvironmentProblem, match=r"two.py' has several environments \(Counter, Other\); set environment"
    ):
        load_environment(EnvironmentSpec(path=two))
    assert load_environment(EnvironmentSpec("Other", path=two, kwargs={"start": 7}))().step(Action("")).reward == 7.0


def test_a_file_without_a_class_has_its_public_functions_as_tools(file: Any) -> None:
    made = load_environment(EnvironmentSpec(path=file(TOOLS), kwargs={"ignored": 1}))()
    assert isinstance(made, ToolEnvironment) and [t["function"]["name"] for t in made.tools] == ["shout"]
    with pytest.raises(EnvironmentProblem, match=r"none\.py: no functions to use as tools"):
        load_environment(EnvironmentSpec(path=file("number = 3", "none.py")))


def test_what_a_file_does_not_have_is_said_with_what_it_has(file: Any) -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"mine.py' has no 'Count'; it has Board, Counter, Guess, Step, helper$"
    ):
        load_environment(EnvironmentSpec("Count", path=file(ONE)))
    with pytest.raises(EnvironmentProblem, match=r"environment\.path"):
        load_environment(EnvironmentSpec(path="no_such_file.py"))
    with pytest.raises(EnvironmentProblem, match=r"rollout\.multi_turn\.function_tool_path"):
        load_environment(EnvironmentSpec(function_tool_path="no_such_file.py"))


@pytest.mark.parametrize(
    ("spec", "title"),
    [
        (EnvironmentSpec("a", path="b", made=Guess), "Guess"),
        (EnvironmentSpec("a", made=Guess()), "Guess"),
        (EnvironmentSpec("a", path="b"), "a"),
        (EnvironmentSpec(path="b", tool_config_path="c"), "b"),
        (EnvironmentSpec(tool_config_path="c", function_tool_path="d"), "c"),
        (EnvironmentSpec(function_tool_path="d"), "d"),
        (EnvironmentSpec(), ""),
    ],
)
def test_what_messages_call_an_environment(spec: EnvironmentSpec, title: str) -> None:
    assert spec.title == title


class TestVerlsTools:
    def test_the_stand_in_for_verl_lasts_for_an_import_and_is_left_out_where_verl_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with standing_in():
            from verl.tools.base_tool import BaseTool as stands_in  # type: ignore[import-not-found]

            assert stands_in is BaseTool and sys.modules["verl.tools.schemas"].ToolResponse is ToolResponse
        assert not [name for name in sys.modules if name.partition(".")[0] == "verl"]
        monkeypatch.setattr(loading.load_tools.__globals__["importlib"].util, "find_spec", lambda name: object())
        with standing_in():
            assert "verl" not in sys.modules

    def test_a_mark_gives_a_name_and_a_schema(self) -> None:
        schema = {"type": "function", "function": {"name": "given", "parameters": {}}}

        def plain(word: str) -> str:
            """Say it."""
            return word

        module = ModuleType("marked")
        module.__file__ = "marked.py"
        for name, made in {
            "one": mark_tool(lambda: "1"),
            "two": mark_tool("second")(lambda: "2"),
            "three": mark_tool(schema=as_schema(schema))(lambda: "3"),
            "unmarked": plain,
        }.items():
            made.__module__, made.__name__ = "marked", name
            setattr(module, name, made)
        module.one._verl_tool = ("one", None)  # type: ignore[attr-defined]  # its name when it was marked
        tools = VerlTools([], tool_functions(module))
        assert [tool["function"]["name"] for tool in tools.tools] == ["one", "second", "given"]
        assert tools.tools[2] == schema
        step = tools.step(Action("", [ToolCall(name) for name in ("one", "second", "given")]))
        assert [message["content"] for message in step.messages] == ["1", "2", "3"]

    def test_functions_that_verl_itself_registered_have_its_name_and_schema(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def own() -> str:
            return "own"

        def other() -> str:
            return "other"

        module = ModuleType(own.__module__)
        module.own = own  # type: ignore[attr-defined]
        schema = {"type": "function", "function": {"name": "called", "parameters": {}}}
        registered = {
            n: SimpleNamespace(fn=fn, name=n, tool_schema=schema) for n, fn in (("called", own), ("x", other))
        }
        verl = SimpleNamespace(FUNCTION_TOOL_REGISTRY=registered)
        monkeypatch.setitem(sys.modules, "verl.tools.function_tool", verl)
        assert tool_functions(module) == [own]
        assert VerlTools([], tool_functions(module)).tools == [schema]

    def test_an_instance_is_created_at_the_first_call_with_what_its_tool_accepts_and_released_once(self) -> None:
        events: list[Any] = []

        class Narrow(BaseTool):
            async def create(self, instance_id: str | None = None, start: int = 0) -> str:
                events.append(("create", start))
                return "mine"

            async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
                events.append((instance_id, parameters))
                return (ToolResponse(text=None), 0.5)

            async def release(self, instance_id: str, **kwargs: Any) -> None:
                events.append(("release", instance_id))

        schema = as_schema({"type": "function", "function": {"name": "narrow", "parameters": {}}})
        tools = VerlTools([Narrow({}, schema), BaseTool({}, as_schema({"function": {"name": "idle"}}))])
        row = {"tools_kwargs": {"narrow": {"create_kwargs": {"start": 3, "unknown": 4}}, "idle": {}}}
        tools.reset(Prompt("p", (), (), extra=row), 0)
        step = tools.step(Action("", [ToolCall("narrow", {"a": 1}), ToolCall("narrow", {})]))
        assert [message["content"] for message in step.messages] == ["", ""]
        assert (step.done, step.reward, step.metrics) == (False, None, {"tool_reward": 1.0})
        failed = tools.step(Action("", [ToolCall("nothing")]))
        assert (failed.num_errors, failed.metrics) == (1, {"tool_reward": 1.0})
        idle = tools.step(Action("", [ToolCall("idle")]))
        assert idle.messages[0]["content"] == "Updated the tool state."
        tools.close()
        tools.close()
        assert events == [("create", 3), ("mine", {"a": 1}), ("mine", {}), ("release", "mine")]

    def test_a_tool_may_make_its_schema_itself(self) -> None:
        class Own(BaseTool):
            def get_openai_tool_schema(self) -> Any:
                return as_schema({"type": "function", "function": {"name": "own", "parameters": {}}})

        made = Own({"a": 1}, None)
        assert (made.name, made.config) == ("own", {"a": 1})
        assert VerlTools([made]).tools[0]["function"] == {"name": "own", "parameters": {}}
