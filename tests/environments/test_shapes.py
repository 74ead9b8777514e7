"""What environments of other systems are given and what is read from their answers, value by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gspo.environments.builtin import GridWorld, Guess
from gspo.environments.protocol import Action, EnvironmentProblem, ToolCall
from gspo.environments.shapes import as_environment
from gspo.environments.tools import ToolEnvironment, function_tool, schema_of
from gspo.types import Prompt

ROW = Prompt(
    "p", ({"role": "user", "content": "?"},), (1,), data_source="maths", ground_truth=5, extra={"start": 2, "seed": 9}
)


class Recorder:
    """An environment with gymnasium's methods that keeps what it is given."""

    def __init__(self, *answer: Any) -> None:
        self.answer, self.seen = answer, []

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self.seen.append(seed)
        return 7, {}

    def step(self, action: Any) -> Any:
        self.seen.append(action)
        return self.answer


def test_gymnasium_gets_a_seed_of_31_bits_and_the_text_where_its_actions_are_not_numbers() -> None:
    info = {"acc": np.bool_(True), "size": np.int64(3), "won": False, "name": "x", "none": None, "board": np.zeros(2)}
    made = Recorder("seen", 0.5, False, True, {**info, "odds": float("inf"), "gap": float("nan")})
    environment = as_environment(made, "recorder")
    assert environment.reset(ROW, seed=2**31 + 4) == ({"role": "user", "content": "7"},)
    step = environment.step(Action("arm 2"))
    assert made.seen == [4, "arm 2"]
    assert (step.messages, step.reward, step.done, step.truncated) == (
        ({"role": "user", "content": "seen"},),
        0.5,
        False,
        True,
    )
    assert step.metrics == {"acc": 1.0, "size": 3.0, "won": 0.0} and step.num_errors == 0
    environment.close()


def test_a_reset_of_any_options_is_gymnasiums() -> None:
    class Open(Recorder):
        def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
            return sorted(options), {}

    assert as_environment(Open(), "open").reset(ROW, seed=3) == ({"role": "user", "content": "['seed']"},)


def test_an_environment_of_our_own_shape_is_served_as_it_is() -> None:
    class Own:
        def reset(self, prompt, seed): ...

        def step(self, action): ...

    made = Own()
    assert as_environment(made, "own") is made
    assert tuple(made.tools) == () and made.close() is None


@pytest.mark.parametrize("parameters", ["place", "seed_first", "prompt"])
def test_a_reset_of_another_shape_is_refused_with_its_parameters(parameters: str) -> None:
    made = type("Odd", (), {"step": lambda self, action: None})()
    made.reset = eval(f"lambda {parameters}: None")
    with pytest.raises(EnvironmentProblem, match=rf"environment 'odd' has reset\({parameters}\)"):
        as_environment(made, "odd")


def test_skyrl_may_add_messages_but_not_change_those_of_the_prompt() -> None:
    class Sky:
        closed = False

        def init(self, prompt):
            return self.chat(prompt)

        def step(self, text):
            return {"observations": [{"role": "user", "content": text}]}

        def close(self):
            self.closed = True

    made = Sky()
    environment = as_environment(made, "sky")
    made.chat = lambda prompt: prompt
    assert environment.reset(ROW, seed=0) == ()
    made.chat = lambda prompt: ([*prompt, {"role": "user", "content": "!"}], {})
    assert environment.reset(ROW, seed=0) == ({"role": "user", "content": "!"},)
    for changed in (
        lambda prompt: [{"role": "system", "content": "s"}, *prompt],
        lambda prompt: [prompt[0].update(content="another question") or prompt[0]],
    ):
        made.chat = changed
        with pytest.raises(EnvironmentProblem, match="changed the messages"):
            environment.reset(ROW, seed=0)
    assert ROW.messages[0]["content"] == "?"
    step = environment.step(Action("so"))
    assert (step.reward, step.done, step.metrics) == (None, False, {})
    environment.close()
    assert made.closed


class Trl:
    """TRL's methods; `columns` are what `reset` was given."""

    reward = 0.5

    def reset(self, answer, ground_truth, data_source, start, prompt, seed, missing=3):
        self.columns = (answer, ground_truth, data_source, start, prompt, seed, missing)

    def look(self) -> str:
        """Look."""
        return "door"

    def get_reward(self) -> float:
        return self.reward

    def _hidden(self) -> None: ...


def test_trl_gets_the_columns_that_it_names_and_is_asked_for_its_reward_once_the_episode_ends() -> None:
    made = Trl()
    environment = as_environment(made, "trl")
    assert [tool["function"]["name"] for tool in environment.tools] == ["look"]
    assert environment.reset(ROW, seed=4) == ()
    assert made.columns == (5, 5, "maths", 2, [{"role": "user", "content": "?"}], 4, 3)
    look = [ToolCall("look")]
    assert environment.step(Action("", look)).reward is None
    cut = environment.step(Action("", look, was_cut=True))
    assert (cut.reward, cut.done, cut.messages[0]["content"]) == (0.5, False, "door")
    failed = environment.step(Action("", [ToolCall("no")], was_cut=True))
    assert failed.num_errors == 1
    assert environment.step(Action("", look, is_last=True)).reward == 0.5
    last = environment.step(Action("done"))
    assert (last.reward, last.done, last.num_errors) == (0.5, True, 0)


def test_trl_without_a_reward_leaves_it_to_the_reward_function() -> None:
    class Plain:
        def reset(self, **row):
            return ""

        def look(self) -> str:
            return "door"

    environment = as_environment(Plain(), "plain")
    assert environment.reset(ROW, seed=4) == () and environment.step(Action("done")).reward is None


def test_one_text_is_the_first_argument_unless_there_is_one_of_its_name() -> None:
    def pair(first: str, second: str = "b") -> str:
        return first + second

    def named(other: str = "a", input: str = "b") -> str:
        return other + input

    assert function_tool(pair).run({"input": "x"}) == "xb"
    assert function_tool(named).run({"input": "x"}) == "ax"
    environment = ToolEnvironment([pair, named])
    step = environment.step(Action("", [ToolCall("", {"input": "x"}), ToolCall("named", {"other": "c"})]))
    assert [(m["name"], m["content"]) for m in step.messages] == [("", "xb"), ("named", "cb")]


def test_async_tools_are_awaited_and_exits_are_answers() -> None:
    async def later(x: int) -> int:
        return x + 1

    def leave() -> None:
        raise SystemExit(3)

    def large() -> None:
        raise MemoryError

    step = ToolEnvironment([later, leave, large]).step(
        Action("", [ToolCall("later", {"x": 1}), ToolCall("leave"), ToolCall("large")])
    )
    assert [m["content"] for m in step.messages] == ["2", "error: SystemExit: 3", "error: out of memory"]
    assert step.num_errors == 2


def test_tools_need_names_of_their_own() -> None:
    with pytest.raises(EnvironmentProblem, match="at least one function"):
        ToolEnvironment([])
    one, two = (function_tool(lambda x: x, {"function": {"name": "same"}}) for _ in range(2))
    with pytest.raises(EnvironmentProblem, match="several tools have the name same;"):
        ToolEnvironment([one, two])


def test_the_schema_of_every_kind_of_annotation() -> None:
    def every(a: int | None, b: float, c: bool, d: dict, e: tuple[int, ...], f: list, g: object, h, *more, i: str = ""):
        """Do it
        all.

        Args:
            a (int): The first,
                on two lines.
            h: The last.

        Returns:
            b: nothing of the second.
        """

    schema = schema_of(every)["function"]
    assert schema["description"] == "Do it all."
    assert schema["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first, on two lines."},
        "b": {"type": "number"},
        "c": {"type": "boolean"},
        "d": {"type": "object"},
        "e": {"type": "array", "items": {"type": "integer"}},
        "f": {"type": "array"},
        "g": {},
        "h": {"type": "string", "description": "The last."},
        "i": {"type": "string"},
    }
    assert schema["parameters"]["required"] == ["a", "b", "c", "d", "e", "f", "g", "h"]


def test_annotations_that_only_a_type_checker_knows_say_nothing() -> None:
    def move(self_: Board, steps: int, word: str = "") -> Board:  # type: ignore[name-defined]  # noqa: F821
        """Move."""

    schema = schema_of(move)["function"]["parameters"]
    assert schema["properties"] == {"self_": {}, "steps": {"type": "integer"}, "word": {"type": "string"}}
    assert schema["required"] == ["self_", "steps"]


def test_the_number_to_guess_is_that_of_the_row_or_of_the_seed() -> None:
    def answers(environment: Guess, texts: list[str]) -> list[Any]:
        return [environment.step(Action(text, turn=turn)) for turn, text in enumerate(texts)]

    drawn = Guess(high=3)
    found = set()
    for seed in range(30):
        drawn.reset(Prompt("p", (), ()), seed=seed)
        found |= {n for n in range(5) if drawn.step(Action(str(n))).done}
    assert found == {1, 2, 3}
    zero = Guess(guesses=4)
    zero.reset(Prompt("p", (), (), ground_truth=0), seed=1)
    steps = answers(zero, ["1", "no", "5 then 0", "2"])
    assert [step.done for step in steps] == [False, False, True, False]
    assert [step.truncated for step in steps] == [False, False, False, True]
    assert [step.reward for step in steps] == [-0.05, -0.05, 0.95, -0.05]
    assert [[m["content"] for m in step.messages] for step in steps] == [["lower"], ["no number"], [], ["lower"]]
    assert [step.metrics["guesses"] for step in steps] == [1.0, 2.0, 3.0, 4.0]


def test_the_grid_stops_at_its_edges_and_walls_and_ends_at_the_goal_or_the_last_move() -> None:
    grid = GridWorld(size=3, num_walls=1, max_moves=4)
    grid.reset(seed=0)
    grid._goal, grid._walls = (0, 2), [(1, 0)]
    seen = [grid.step(word) for word in ("up", "down", "left or RIGHT", "no way")]
    assert [text.splitlines()[:2] for text, *_ in seen] == [["A.G", "#.."]] * 2 + [[".AG", "#.."]] * 2
    assert [late for *_, late, _ in seen] == [False, False, False, True]
    text, reward, won, late, info = grid.step("right")
    assert (text.splitlines()[0], reward, won, late, info) == ("..A", 1.0, True, False, {"acc": 1.0})
    first = grid.reset(seed=3)
    assert first == grid.reset(seed=3) != grid.reset(seed=4)
    assert len(grid._walls) == 1 and (0, 0) not in (grid._goal, *grid._walls)
