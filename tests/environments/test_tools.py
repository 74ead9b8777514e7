"""Tools: schemas, calls that work, calls that fail in front of the model."""

from __future__ import annotations

import signal
import time
from typing import Literal

import pytest

from gspo.environments.builtin import Calculator, GridWorld, Guess, PythonTool
from gspo.environments.protocol import Action, EnvironmentProblem, ToolCall
from gspo.environments.shapes import as_environment
from gspo.environments.tools import ToolEnvironment, schema_of
from gspo.types import Prompt

PROMPT = Prompt("p", ({"role": "user", "content": "?"},), ())


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """The weather of a city.

    Args:
        city: Its name,
            in English.
        days: How many days ahead.

    Returns:
        A text.
    """
    if city == "nowhere":
        raise KeyError(city)
    return f"{city} {days} {unit}"


def slow() -> str:
    """Never answers."""
    time.sleep(60)
    return "late"


def call(environment, *calls: ToolCall, text: str = ""):
    return environment.step(Action(text, calls))


def test_a_schema_has_types_defaults_and_the_texts_of_the_docstring() -> None:
    function = schema_of(weather)["function"]
    assert function["name"] == "weather" and function["description"] == "The weather of a city."
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"] == {
        "city": {"type": "string", "description": "Its name, in English."},
        "days": {"type": "integer", "description": "How many days ahead."},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    }


def test_failures_of_tools_are_answers_that_the_model_sees() -> None:
    environment = ToolEnvironment([weather, slow])
    environment.tool_timeout = 0.2
    step = call(
        environment,
        ToolCall("weather", {"city": "Rome", "days": 2}),
        ToolCall("weather", {"city": "nowhere"}),
        ToolCall("weather", {"town": "Rome"}),
        ToolCall("whether", {}),
        ToolCall("", {}, error="the tool call is not valid JSON"),
        ToolCall("slow"),
    )
    texts = [message["content"] for message in step.messages]
    assert texts[0] == "Rome 2 C" and step.num_errors == 5 and not step.done
    assert texts[1] == "error: KeyError: 'nowhere'"
    assert "missing a required argument: 'city'" in texts[2]
    assert texts[3] == "error: there is no tool 'whether'; the tools are weather, slow"
    assert texts[4] == "error: the tool call is not valid JSON"
    assert texts[5] == "error: no answer within 0.2 s"
    assert {message["role"] for message in step.messages} == {"tool"}
    assert call(environment).done


def test_a_tools_own_handler_does_not_keep_it_alive_and_its_deadline_ends_with_its_answer() -> None:
    def stubborn() -> str:
        """Goes on after errors."""
        try:
            time.sleep(60)
        except Exception:
            return "went on"
        return "late"

    environment = ToolEnvironment([stubborn, weather])
    environment.tool_timeout = 0.2
    handler = signal.getsignal(signal.SIGALRM)
    assert call(environment, ToolCall("stubborn")).messages[0]["content"] == "error: no answer within 0.2 s"
    assert call(environment, ToolCall("weather", {"city": "Rome"})).num_errors == 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("38*47+19", "1805"),
        ("(2-5)*-3", "9"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("1/0", "error: division by zero"),
        ("2**9", "error: only numbers, +, -, *, /, //, % and parentheses are allowed"),
        ("__import__('os')", "error: only numbers, +, -, *, /, //, % and parentheses are allowed"),
        ("1+", "error: this is not an arithmetic expression"),
        ("9" * 60, "error: the result is too large"),
        ("1e308*10", "error: the result is too large"),
        ("1" + "+1" * 200, "error: the expression is longer than 200 characters"),
    ],
)
def test_the_calculator(expression: str, answer: str) -> None:
    step = call(Calculator(), ToolCall("", {"input": expression}))
    assert [message["content"] for message in step.messages] == [answer]
    assert step.num_errors == answer.startswith("error")


def test_python_keeps_its_names_and_shows_only_new_output() -> None:
    environment = PythonTool()
    environment.tool_timeout = 20.0
    environment.reset(PROMPT, seed=3)

    def run(code: str) -> str:
        return call(environment, ToolCall("python", {"code": code})).messages[0]["content"]

    assert run("x = 6\nprint('set')") == "set"
    assert run("x * 7") == "42"
    assert run("y = x + 1\nraise ValueError('no')") == "error: ValueError: no"
    assert run("print(x, y)") == "6 7"
    assert run("open('/etc/passwd').read()").startswith("error:")
    drawn = run("import numpy\nz = numpy.random.rand()\nz")
    assert run("z") == drawn
    first = run("import random\nrandom.random()")
    again = PythonTool()
    again.tool_timeout = 20.0
    again.reset(PROMPT, seed=3)
    assert call(again, ToolCall("python", {"code": "import random\nrandom.random()"})).messages[0]["content"] == first


def test_python_code_that_hangs_or_crashes_is_not_run_again() -> None:
    environment = PythonTool()
    environment.reset(PROMPT, seed=3)

    def run(code: str, seconds: float) -> str:
        environment.tool_timeout = seconds
        return call(environment, ToolCall("python", {"code": code})).messages[0]["content"]

    assert run("x = 1", 20.0) == ""
    assert run("x = 2\nwhile True: pass", 0.4) == "error: no answer within 0.4 s"
    for code in (0, 1, 5):
        assert run(f"import os\nx = 3\nos._exit({code})", 20.0) == "error: the program was stopped"
    assert run("x", 20.0) == "1"


def test_guess_answers_costs_and_ends() -> None:
    environment = Guess(high=64, guesses=3, cost=0.1)
    environment.reset(Prompt("p", (), (), ground_truth=20), seed=0)
    answers = [environment.step(Action(text, turn=turn)) for turn, text in enumerate(["30", "maybe 10", "20"])]
    assert [a.messages[0]["content"] for a in answers[:2]] == ["lower", "higher"]
    assert [a.reward for a in answers] == [-0.1, -0.1, 0.9]
    assert answers[-1].done and answers[-1].metrics == {"acc": 1.0, "guesses": 3.0}
    environment.reset(Prompt("p", (), (), ground_truth=20), seed=0)
    lost = environment.step(Action("none", turn=2))
    assert lost.truncated and not lost.done and lost.metrics["acc"] == 0.0


def test_a_gymnasium_shape_is_recognised() -> None:
    environment = as_environment(GridWorld(size=2, num_walls=0), "gridworld")
    (message,) = environment.reset(PROMPT, seed=5)
    assert message["role"] == "user" and "A" in message["content"] and "G" in message["content"]
    rewards = []
    for move in ("right", "down", "left", "up") * 2:
        step = environment.step(Action(f"I go {move}"))
        rewards.append(step.reward)
        if step.done:
            break
    assert step.done and rewards[-1] == 1.0 and step.metrics["acc"] == 1.0
    environment.close()


def test_discrete_actions_are_numbers_of_the_text() -> None:
    class Space:
        n, start = 3, 0

    class Bandit:
        action_space = Space()

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return action, float(action == 2), action == 2, action == 1, {"arm": action, "name": "x"}

    environment = as_environment(Bandit(), "bandit")
    assert environment.reset(PROMPT, seed=2**40)[0]["content"] == "0"
    assert environment.step(Action("0" * 17 + "2")).num_errors == 0
    for text in ("arm nine", "arm 3", "arm 2 or 3", "0" * 18 + "2", "2" * 5000):
        wrong = environment.step(Action(text))
        assert wrong.num_errors == 1 and wrong.reward is None and "from 0 to 2" in wrong.messages[0]["content"]
    right = environment.step(Action("not arm 0 but arm 2"))
    assert right.reward == 1.0 and right.done and not right.truncated and right.metrics == {"arm": 2.0}
    late = environment.step(Action("arm 1"))
    assert late.truncated and not late.done
    Space.start = 1
    later = as_environment(Bandit(), "bandit")
    assert [later.step(Action(f"arm {arm}")).num_errors for arm in (0, 1, 3, 4)] == [1, 0, 0, 1]
    assert later.step(Action("arms 1-2")).metrics == {"arm": 2.0}
    Space.start = -1
    below = as_environment(Bandit(), "bandit")
    assert [below.step(Action(f"arm {arm}")).num_errors for arm in (-2, -1, 1, 2)] == [1, 0, 0, 1]
    assert below.step(Action("arm -1")).metrics == {"arm": -1.0}


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentProblem, match="environment 'thing' is of type int"):
        as_environment(3, "thing")


def test_trls_shape_is_recognised() -> None:
    class Counter:
        def reset(self, prompt, start=0, **columns):
            self.count, self.columns = start, columns
            return f"The count is {start}."

        def increment(self, by: int = 1) -> str:
            """Add to the count."""
            self.count += by
            return str(self.count)

        def get_reward(self) -> float:
            return float(self.count == int(self.columns["answer"]))

    environment = as_environment(Counter(), "counter")
    assert [tool["function"]["name"] for tool in environment.tools] == ["increment"]
    row = Prompt("p", ({"role": "user", "content": "?"},), (), ground_truth=5, extra={"start": 2})
    assert environment.reset(row, seed=0) == ({"role": "user", "content": "The count is 2."},)
    assert call(environment, ToolCall("increment", {"by": 3})).messages[0]["content"] == "5"
    last = call(environment, text="done")
    assert last.done and last.reward == 1.0


def test_skyrls_shape_is_recognised() -> None:
    class Multiply:
        def init(self, prompt):
            return [*prompt, {"role": "user", "content": "2*3?"}], {}

        def step(self, action):
            right = action.strip() == "6"
            again = [] if right else [{"role": "user", "content": "again"}]
            return {"observations": again, "reward": float(right), "done": right, "metadata": {"tries": 1, "x": "y"}}

    environment = as_environment(Multiply(), "multiply")
    assert environment.reset(PROMPT, seed=0) == ({"role": "user", "content": "2*3?"},)
    wrong, right = environment.step(Action("5")), environment.step(Action(" 6"))
    assert wrong.messages == ({"role": "user", "content": "again"},) and wrong.reward == 0.0 and not wrong.done
    assert right.done and right.reward == 1.0 and right.metrics == {"tries": 1.0}
