"""Environments of other packages: TextArena's games, MCP servers, OpenEnv servers, verl's tools."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gspo.environments.host import Job
from gspo.environments.loading import EnvironmentSpec, load_environment
from gspo.environments.pool import EpisodePool, open_pool
from gspo.environments.protocol import Action, EnvironmentProblem, ToolCall
from gspo.rewards.pool.worker_pool import JobFailed
from gspo.types import Prompt

HERE = Path(__file__).parent
PROMPT = Prompt("p", ({"role": "user", "content": "?"},), ())


def make(name: str, **kwargs: Any) -> Any:
    return load_environment(EnvironmentSpec(name, kwargs=kwargs))()


def in_workers(spec: EnvironmentSpec, *, timeout: float = 30.0, tool_timeout: float = 20.0) -> EpisodePool:
    return open_pool(
        spec, num_workers=2, timeout=timeout, tool_timeout=tool_timeout, memory=2048, retries=1, max_chars=4000
    )


def played(environment: Any, seed: int, texts: list[str]) -> list[Any]:
    steps = [environment.reset(PROMPT, seed)]
    steps += [environment.step(Action(text, turn=turn)) for turn, text in enumerate(texts)]
    environment.close()
    return steps


class TestTextArena:
    def test_guess_the_number_is_solved_by_bisection(self) -> None:
        game = make("textarena:GuessTheNumber-v0")
        (opening,) = game.reset(PROMPT, 2**40 + 5)
        assert "between 1 and 20" in opening["content"]
        low, high = 1, 20
        for turn in range(6):
            guess = (low + high) // 2
            step = game.step(Action(f"I say [{guess}]", turn=turn))
            if step.done:
                break
            (message,) = step.messages
            assert str(guess) not in message["content"], "the model's own action is not repeated"
            low, high = (guess + 1, high) if "higher" in message["content"] else (low, guess - 1)
        assert step.done and step.reward == 1.0 and step.metrics["acc"] == 1.0

    def test_tower_of_hanoi_is_solved_in_seven_moves(self) -> None:
        moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
        opening, *steps = played(make("textarena:TowerOfHanoi-v0"), 0, [f"[{move}]" for move in moves])
        assert "Tower of Hanoi with 3 disks" in opening[0]["content"]
        assert [step.done for step in steps] == [False] * 6 + [True] and steps[-1].reward == 1.0
        assert "C: [3, 2, 1]" not in steps[0].messages[0]["content"]

    def test_frozen_lake_repeats_itself_for_a_seed(self) -> None:
        texts = ["[right]", "[down]", "[right]", "[down]"]
        one = played(make("textarena:FrozenLake-v0"), 3, texts)
        assert one == played(make("textarena:FrozenLake-v0"), 3, texts)
        boards = {played(make("textarena:FrozenLake-v0"), seed, [])[0][0]["content"] for seed in range(4)}
        assert len(boards) > 1, "the seed chooses the holes"

    def test_wrong_names_and_games_for_two_are_refused(self) -> None:
        with pytest.raises(EnvironmentProblem, match="textarena:Nothing-v0"):
            make("textarena:Nothing-v0")
        with pytest.raises(EnvironmentProblem, match="no game for one player"):
            make("textarena:TicTacToe-v0").reset(PROMPT, 0)


def test_an_mcp_server_on_stdio_serves_a_pool() -> None:
    spec = EnvironmentSpec(f"mcp:{sys.executable} {HERE / 'mcp_server.py'}")
    with closing(in_workers(spec, tool_timeout=6.0)) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["add", "where", "sleep", "leave"]
        calls = [ToolCall("add", {"a": 2, "b": 3}), ToolCall("add", {"a": "x"}), ToolCall("where"), ToolCall("where")]
        late = ToolCall("sleep", {"seconds": 30})
        first, second = (Action("", [*calls, late] if i else calls) for i in range(2))
        answers = [pool.play(Job(key, PROMPT, 0, (action,))) for key, action in enumerate((first, second))]
        steps = [answer.result()["steps"][0] for answer in answers]
        texts = [[message["content"] for message in step["messages"]] for step in steps]
        assert texts[0][0] == "5" and "error" in texts[0][1] and texts[0][2] == texts[0][3]
        assert texts[1][4] == "error: no answer within 6 s"
        servers = {int(text[2]) for text in texts}
        assert len(servers) == 2, "each worker has a server of its own"
        again = pool.play(Job(1, PROMPT, 0, (second, Action("", [calls[0]])), 1)).result()
        assert again["steps"][0]["messages"][0]["content"] == "5", "the connection survives a late answer"
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in servers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers), "no server outlives its pool"


@pytest.mark.slow
def test_an_mcp_process_that_ends_is_replaced() -> None:
    environment = make(f"mcp:{sys.executable} {HERE / 'mcp_server.py'}")
    environment.reset(PROMPT, 0)

    def call(name: str, **arguments: Any) -> str:
        return environment.step(Action("", [ToolCall(name, arguments)])).messages[0]["content"]

    first = int(call("where"))
    os.kill(first, signal.SIGKILL)
    second = int(call("where"))
    assert second != first, "the call that finds no server is made once more"
    assert call("leave") == "error: the MCP server ended during the call"
    assert int(call("where")) not in (first, second)
    environment._server().close()


def test_an_mcp_server_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentProblem, match="mcp:no-such-program cannot be reached"):
        make("mcp:no-such-program")


@pytest.fixture(scope="module")
def openenv() -> Iterator[str]:
    import uvicorn

    from tests.environments.openenv_server import app

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


class TestOpenEnv:
    def test_an_episode_is_a_session(self, openenv: str) -> None:
        from tests.environments.openenv_server import sessions

        environment = make(f"openenv:{openenv}")
        assert environment.reset(PROMPT, 2**31 + 1) == ({"role": "user", "content": "6 left"},)
        assert len(sessions) == 1
        step = environment.step(Action("I take 2, no, 4"))
        assert step.messages == ({"role": "user", "content": "2 left"},) and step.reward == 0.0 and not step.done
        for text in ("nothing", "take 0"):
            refused = environment.step(Action(text))
            assert refused.num_errors == 1 and refused.messages[0]["content"].startswith("error: ") and not refused.done
        last = environment.step(Action("2"))
        assert last.done and last.reward == 1.0
        environment.close()
        deadline = time.monotonic() + 10
        while sessions and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not sessions

    def test_an_error_of_the_server_is_a_failed_environment(self, openenv: str) -> None:
        with closing(in_workers(EnvironmentSpec(f"openenv:{openenv}"))) as pool:
            good = pool.play(Job("a", PROMPT, 0, (Action("3"), Action("2"))))
            bad = pool.play(Job("b", PROMPT, 0, (Action("9"),)))
            assert good.result()["steps"][1]["done"] and good.result()["opening"][0]["content"] == "5 left"
            with pytest.raises(JobFailed, match="nothing is left"):
                bad.result()

    def test_wrong_places_and_fields_are_refused(self, openenv: str) -> None:
        with pytest.raises(EnvironmentProblem, match="expected the URL of a running OpenEnv server"):
            make(f"openenv:{openenv}/elsewhere")
        with pytest.raises(EnvironmentProblem, match="the server's actions have take"):
            make(f"openenv:{openenv}", action_field="give")


FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool("double_it")
async def double(number: int) -> str:
    """Twice a number.

    Args:
        number: Any number.
    """
    return ToolResponse(text=str(2 * number)), 0.25

@function_tool
def pair(word: str) -> dict:
    """A word, twice.

    Args:
        word: Any word.
    """
    return {"words": [word, word]}

def helper() -> None:
    """Not a tool."""
'''
CLASSES = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

released = []

class Memory(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.told = {}

    async def create(self, instance_id=None, **kwargs):
        name = kwargs["create_kwargs"]["owner"]
        self.told[name] = []
        return name, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.told[instance_id].append(parameters["word"])
        return ToolResponse(text=f"{instance_id}: {self.config['sep'].join(self.told[instance_id])}"), 0.5, {}

    async def release(self, instance_id, **kwargs):
        released.append(instance_id)
        del self.told[instance_id]
"""
COUNTER = """
from verl.tools.base_tool import BaseTool

class Counter(BaseTool):
    counts = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.counts[instance_id] = start
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        return str(self.counts[instance_id]), None, {}
"""
PLAIN = '''
from types import SimpleNamespace

def give(number: int):
    """One of several values."""
    return (0, 0.0, False, [], None, (SimpleNamespace(text="no text"), 2), {"a": "é"})[number]
'''
CONFIG = """
tools:
  - class_name: verl_memory.Memory
    config: {type: native, sep: "-"}
    tool_schema:
      type: function
      function:
        name: remember
        description: Keep a word.
        parameters: {type: object, properties: {word: {type: string, description: A word.}}, required: [word]}
"""


class TestVerl:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "functions.py").write_text(FUNCTIONS)
        (tmp_path / "verl_memory.py").write_text(CLASSES)
        (tmp_path / "tools.yaml").write_text(CONFIG)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "verl_memory", raising=False)
        return tmp_path

    def test_an_unchanged_file_of_function_tools_runs(self, folder: Path) -> None:
        environment = load_environment(EnvironmentSpec(function_tool_path=str(folder / "functions.py")))()
        assert [tool["function"]["name"] for tool in environment.tools] == ["double_it", "pair"]
        step = environment.step(Action("", [ToolCall("double_it", {"number": 4}), ToolCall("pair", {"word": "a"})]))
        assert [message["content"] for message in step.messages] == ["8", '{"words": ["a", "a"]}']
        assert step.reward is None and step.metrics == {"tool_reward": 0.25}
        assert "verl" not in sys.modules

    def test_tools_with_instances_keep_their_state_for_an_episode(self, folder: Path) -> None:
        spec = EnvironmentSpec(
            tool_config_path=str(folder / "tools.yaml"), function_tool_path=str(folder / "functions.py")
        )
        new = load_environment(spec)
        episodes = {}
        for owner in ("ann", "bob"):
            episodes[owner] = new()
            row = {"tools_kwargs": {"remember": {"create_kwargs": {"owner": owner}}}}
            episodes[owner].reset(Prompt("p", (), (), extra=row), 0)
        names = [tool["function"]["name"] for tool in episodes["ann"].tools]
        assert names == ["remember", "double_it", "pair"]
        said = [
            episodes[owner].step(Action("", [ToolCall("remember", {"word": word})])).messages[0]["content"]
            for owner, word in (("ann", "x"), ("bob", "y"), ("ann", "z"))
        ]
        assert said == ["ann: x", "bob: y", "ann: x-z"]
        last = episodes["ann"].step(Action("done"))
        assert last.done and last.reward is None and last.metrics["tool_reward"] == 1.0
        episodes["ann"].close()
        assert sys.modules["verl_memory"].released == ["ann"]

    def test_every_plain_answer_is_shown_as_it_is(self, folder: Path) -> None:
        (folder / "plain.py").write_text(PLAIN)
        environment = load_environment(EnvironmentSpec(function_tool_path=str(folder / "plain.py")))()
        step = environment.step(Action("", [ToolCall("give", {"number": number}) for number in range(7)]))
        assert [message["content"] for message in step.messages] == [
            "0",
            "0.0",
            "False",
            "[]",
            "",
            "no text",
            '{"a": "é"}',
        ]
        assert step.num_errors == 0 and step.metrics == {"tool_reward": 2.0}

    def test_episodes_have_instances_of_their_own_with_what_their_row_says(self, folder: Path) -> None:
        (folder / "verl_memory.py").write_text(COUNTER)
        (folder / "tools.yaml").write_text(
            CONFIG.replace("Memory", "Counter").replace('    config: {type: native, sep: "-"}\n', "")
        )
        new = load_environment(EnvironmentSpec(tool_config_path=str(folder / "tools.yaml")))
        rows: list[dict[str, Any]] = [
            {},
            {"tools_kwargs": None},
            {"tools_kwargs": {"remember": None}},
            {"tools_kwargs": {"remember": {"create_kwargs": None}, "other": {}}},
            {"tools_kwargs": {"remember": {"create_kwargs": {"start": 5}}}},
        ]
        episodes = [new() for _ in rows]
        for episode, row in zip(episodes, rows):
            episode.reset(Prompt("p", (), (), extra=row), 0)
        said = [
            [
                episode.step(Action("", [ToolCall("remember", {"word": "x"})])).messages[0]["content"]
                for episode in episodes
            ]
            for _ in range(2)
        ]
        assert said == [["1", "1", "1", "1", "6"], ["2", "2", "2", "2", "7"]]

    def test_a_broken_list_of_tools_is_refused(self, folder: Path) -> None:
        (folder / "tools.yaml").write_text("tools: [{class_name: nowhere.Nothing}]")
        with pytest.raises(EnvironmentProblem, match=r"tool_config_path=.*nowhere"):
            load_environment(EnvironmentSpec(tool_config_path=str(folder / "tools.yaml")))
