"""The four signatures of reward functions: recognised, called with the right arguments, sync and async."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest

from gspo.rewards.compose import as_specs
from gspo.rewards.functions import CUSTOM, Response, RewardSpec, load_function, parse_spec, wrap_function
from gspo.rewards.protocol import RewardError
from gspo.rewards.signatures import detect_style
from gspo.types import Prompt, Reward, Turn

PROMPT = Prompt(
    "file.jsonl:7",
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}),
    (11, 12),
    "sums",
    "5",
    {"level": 3},
)
RESPONSES = [Response("5", (1, 2), 0), Response("six", (3,), 1, "length")]


def ours(prompt: Prompt, response: Response) -> Reward:
    return Reward(float(response == prompt.ground_truth), extra={"tokens": response.num_tokens})


def verls(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    right = solution_str == ground_truth and data_source == "sums" and extra_info["level"] == 3
    return {"score": 2.0 * right - 1.0, "acc": right, "pred": solution_str, "length": len(solution_str)}


def trls(completions: list[str], ground_truth: list[str], level: list[int], **kwargs: Any) -> list[float]:
    assert kwargs["prompts"] == ["Be brief.\n2+3?"] * 2 and kwargs["completion_ids"] == [[1, 2], [3]]
    return [float(c == t) * n for c, t, n in zip(completions, ground_truth, level)]


def areals(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any):
    assert prompt == "Be brief.\n2+3?" and prompt_ids == [11, 12] and data["level"] == 3
    return len(completion_ids) if completions == answer else 0


@pytest.mark.parametrize(
    ("fn", "style", "scores"),
    [(ours, "gspo", [1, 0]), (verls, "verl", [1, -1]), (trls, "trl", [3, 0]), (areals, "areal", [2, 0])],
)
def test_each_signature_is_recognised_and_gets_its_arguments(fn: Any, style: str, scores: list[float]) -> None:
    function = wrap_function(fn)
    assert function.style == style
    graded = function.grade(PROMPT, RESPONSES)
    assert [reward.score if isinstance(reward, Reward) else reward for reward in graded] == scores


@pytest.mark.parametrize(("fn", "scores"), [(ours, [1, 0]), (verls, [1, -1]), (trls, [3, 0]), (areals, [2, 0])])
def test_async_functions_give_the_same(fn: Any, scores: list[float]) -> None:
    @functools.wraps(fn)
    async def later(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return fn(*args, **kwargs)

    function = wrap_function(later)
    assert function.needs_whole_group
    assert [r.score if isinstance(r, Reward) else r for r in function.grade(PROMPT, RESPONSES)] == scores


def test_responses_of_an_async_function_are_awaited_together() -> None:
    waiting, most = 0, 0

    async def judge(prompt: Prompt, response: str) -> float:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        waiting -= 1
        return 1.0

    wrap_function(judge).grade(PROMPT, [Response("a", index=i) for i in range(5)])
    assert most == 5


def test_verl_dict_gives_acc_and_metrics_and_drops_texts() -> None:
    reward = wrap_function(verls).grade(PROMPT, RESPONSES)[0]
    assert isinstance(reward, Reward)
    assert reward.acc == 1.0 and reward.extra == {"length": 1.0}


def test_trl_function_written_for_chats_gets_messages() -> None:
    def chat(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    assert [r.score for r in wrap_function(chat).grade(PROMPT, RESPONSES) if isinstance(r, Reward)] == [1, 3]


def test_trl_type_error_of_its_own_is_reported_as_it_was() -> None:
    def broken(completions: list[str], **kwargs: Any) -> list[float]:
        return [len(completions) + "x"]  # type: ignore[operator]

    failure = wrap_function(broken).grade(PROMPT, RESPONSES)[0]
    assert isinstance(failure, str) and "unsupported operand" in failure and "test_signatures.py" in failure


def test_reward_kwargs_are_bound() -> None:
    def scaled(data_source: str, solution_str: str, ground_truth: str, scale: float = 1.0, **_: Any) -> float:
        return scale * len(solution_str)

    graded = wrap_function(scaled, kwargs={"scale": 10.0}).grade(PROMPT, RESPONSES)
    assert [r.score for r in graded if isinstance(r, Reward)] == [10, 30]


def test_a_parameter_that_must_be_set_is_set_by_kwargs() -> None:
    def shorter(prompt: Prompt, response: str, *, limit: int) -> float:
        return limit - len(response)

    graded = wrap_function(shorter, kwargs={"limit": 5}).grade(PROMPT, RESPONSES)
    assert [r.score for r in graded if isinstance(r, Reward)] == [4, 2]
    with pytest.raises(RewardError, match="shorter needs a value of limit; set it in kwargs"):
        wrap_function(shorter)
    with pytest.raises(RewardError, match="has no parameter 'limt'; kwargs may set limit"):
        wrap_function(shorter, kwargs={"limt": 5})


@pytest.mark.parametrize("fn", [lambda: 1, lambda a: 1, lambda a, b, c: 1])
def test_unknown_signature_is_refused_with_the_four(fn: Any) -> None:
    with pytest.raises(RewardError, match=r"completions, \*\*columns"):
        detect_style(fn, "fn")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), None, "0.5", [1.0], {"acc": 1}, {"score": "x"}, 1j, 10**400]
)
def test_nonsense_is_a_failure_that_names_function_and_row(value: Any) -> None:
    def odd(prompt: Prompt, response: str) -> Any:
        return value

    graded = wrap_function(odd).grade(PROMPT, RESPONSES)
    for index, failure in enumerate(graded):
        assert isinstance(failure, str)
        assert "odd" in failure and "'file.jsonl:7'" in failure and f"response {index}" in failure


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], 1.0, None])
def test_wrong_length_fails_the_whole_group(values: Any) -> None:
    def batch(completions: list[str], **kwargs: Any) -> Any:
        return values

    graded = wrap_function(batch).grade(PROMPT, RESPONSES)
    assert len(graded) == 2 and all(isinstance(item, str) and "2 completions" in item for item in graded)


def test_one_bad_item_of_a_list_fails_alone() -> None:
    def batch(completions: list[str], **kwargs: Any) -> list[Any]:
        return [0.5, None]

    first, second = wrap_function(batch).grade(PROMPT, RESPONSES)
    assert isinstance(first, Reward) and first.score == 0.5 and isinstance(second, str)


def test_exception_keeps_the_users_part_of_the_traceback() -> None:
    def inner() -> None:
        raise ZeroDivisionError("no apples")

    def raising(prompt: Prompt, response: str) -> float:
        inner()
        return 1.0

    failure = wrap_function(raising).grade(PROMPT, RESPONSES)[0]
    assert isinstance(failure, str)
    assert "ZeroDivisionError: no apples" in failure and "in inner" in failure
    assert "rewards/functions.py" not in failure


def _leave() -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize("fn", [ours, trls])
@pytest.mark.parametrize("kind", ["plain", "async", "awaitable"])
def test_exit_is_a_failure_of_each_response_and_not_the_end(fn: Any, kind: str) -> None:
    async def later(*args: Any, **kwargs: Any) -> Any:
        _leave()

    def awaitable(*args: Any, **kwargs: Any) -> Any:
        return later(*args, **kwargs)

    def plain(*args: Any, **kwargs: Any) -> Any:
        _leave()

    leaving = {"plain": plain, "async": later, "awaitable": awaitable}[kind]
    graded = wrap_function(functools.wraps(fn)(leaving)).grade(PROMPT, RESPONSES)
    for index, failure in enumerate(graded):
        assert isinstance(failure, str) and f"response {index}: SystemExit: 3" in failure
        assert "in _leave" in failure and "asyncio" not in failure and "rewards/functions.py" not in failure


def test_functions_load_from_a_file_and_see_their_neighbours(tmp_path: Any) -> None:
    (tmp_path / "helper_of_reward.py").write_text("FACTOR = 4\n")
    file = tmp_path / "my_reward.py"
    file.write_text("from helper_of_reward import FACTOR\ndef score(prompt, response):\n    return FACTOR\n")
    function = load_function(parse_spec(f"{file}:score"))
    assert [r.score for r in function.grade(PROMPT, RESPONSES) if isinstance(r, Reward)] == [4, 4]
    assert f"{file}:2" in function.where


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def f(p, r): return 1", "g", "has no function 'g'; it has f"),
        ("import no_such_module_here", "f", "ModuleNotFoundError"),
        ("def f(:", "f", "SyntaxError"),
        ("raise SystemExit(3)", "f", "SystemExit"),
        ("open('/no/such/table')", "f", "failed on import: FileNotFoundError"),
    ],
)
def test_files_that_cannot_be_loaded_say_why(tmp_path: Any, text: str, name: str, message: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(RewardError, match=message) as error:
        load_function(parse_spec(f"{file}:{name}"))
    assert "broken.py" in str(error.value)


def test_missing_file_and_module_are_named() -> None:
    for spec, problem in (
        ("/nowhere/reward.py:f", "reward='/nowhere/reward.py': there is no such file"),
        ("no_such_package.rewards:f", "reward='no_such_package.rewards' is neither a file nor an importable module"),
    ):
        with pytest.raises(RewardError, match=re.escape(problem)):
            load_function(parse_spec(spec))


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (RewardSpec("f", path="/no.py", key=CUSTOM), "custom_reward_function.path='/no.py'"),
        ({"name": "f", "path": "/no.py"}, "reward.functions: path='/no.py'"),
        ("/no.py:f", "reward='/no.py'"),
    ],
)
def test_an_error_names_the_key_that_asks_for_the_file(reward: Any, named: str) -> None:
    (spec,) = as_specs(reward)
    assert isinstance(spec, RewardSpec)
    with pytest.raises(RewardError, match=re.escape(named)):
        load_function(spec)
    with pytest.raises(RewardError, match=r"reward\.functions.*has key; only name, path, weight and kwargs are known"):
        as_specs([{"name": "f", "key": "mine"}])


TURNS = (Turn(0, 1, "try", observation="higher"), Turn(1, 2, "done"))
INFO = {"level": 3, "prompt_ids": 9, "prompt": "p", "completions": "c"}
ROW = Prompt("r", ({"role": "user", "content": "q"}, {"role": "tool"}), (7, 8), "src", 5, INFO)
TWO = [Response("done", (1, 2), 0, turns=TURNS), Response("six", (3,), 1)]


def called(signature: Any, result: Any = 1.0, kwargs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """What a function with the parameters of `signature` is called with for the responses `TWO`."""
    calls: list[dict[str, Any]] = []

    @functools.wraps(signature)
    def keep(**values: Any) -> Any:
        calls.append(values)
        return result

    for graded in wrap_function(keep, kwargs=kwargs).grade(ROW, TWO):
        assert isinstance(graded, Reward), graded
    return calls


def test_each_parameter_of_verl_is_passed_where_it_is_asked_for() -> None:
    def some(solution_str: str, extra_info: dict[str, Any]) -> float: ...
    def other(data_source: str, ground_truth: str) -> float: ...
    def every(data_source: str, solution_str: str, **kwargs: Any) -> float: ...
    def lists(solution_strs: list[str], ground_truths: list[Any]) -> list[float]: ...
    def all_lists(data_sources: list[str], solution_strs: list[str], **kwargs: Any) -> list[float]: ...

    assert called(some) == [{"solution_str": text, "extra_info": INFO} for text in ("done", "six")]
    assert called(other) == [{"data_source": "src", "ground_truth": 5}] * 2
    assert called(every)[1] == {"data_source": "src", "solution_str": "six", "ground_truth": 5, "extra_info": INFO}
    assert called(lists, [1.0, 2.0]) == [{"solution_strs": ["done", "six"], "ground_truths": [5, 5]}]
    (wanted,) = called(all_lists, (1.0, 2.0))
    assert wanted == {
        "data_sources": ["src"] * 2,
        "solution_strs": ["done", "six"],
        "ground_truths": [5, 5],
        "extra_infos": [INFO, INFO],
    }
    assert wanted["extra_infos"][0] is not wanted["extra_infos"][1]


def test_columns_of_a_row_never_replace_what_areal_passes_itself() -> None:
    def areal(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float: ...
    def short(completions: str, prompt_ids: Any) -> float: ...

    columns = {"data_source": "src", "ground_truth": 5, "answer": 5, "level": 3}
    first = {"prompt": "q\n", "completions": "done", "prompt_ids": [7, 8], "completion_ids": [1, 2]}
    assert called(areal) == [first | columns, first | {"completions": "six", "completion_ids": [3]} | columns]
    assert called(short) == [{"completions": text, "prompt_ids": [7, 8]} for text in ("done", "six")]


def test_trl_gets_columns_texts_and_on_a_type_error_messages() -> None:
    def trl(completions: list[Any], **columns: Any) -> list[float]: ...
    def narrow(completions: list[Any], level: list[int]) -> list[float]: ...

    columns = {
        "data_source": ["src"] * 2,
        "ground_truth": [5, 5],
        "answer": [5, 5],
        "level": [3, 3],
        "prompt_ids": [9, 9],
        "prompt": ["p", "p"],
        "completion_ids": [[1, 2], [3]],
        "trainer_state": None,
    }
    assert called(trl, [1.0, 2.0]) == [columns | {"prompts": ["q\n"] * 2, "completions": ["done", "six"]}]
    assert called(narrow, [1.0, 2.0]) == [{"completions": ["done", "six"], "level": [3, 3]}]

    def chats(completions: list[Any], prompts: list[Any]) -> list[float]:
        if isinstance(completions[0], str):
            raise TypeError("string indices must be integers")
        seen.append((completions, prompts))
        return [1.0, 2.0]

    seen: list[Any] = []
    wrap_function(chats).grade(ROW, TWO)
    (completions, prompts) = seen[0]
    assert completions == [
        [
            {"role": "assistant", "content": "try"},
            {"role": "tool", "content": "higher"},
            {"role": "assistant", "content": "done"},
        ],
        [{"role": "assistant", "content": "six"}],
    ]
    assert prompts == [[{"role": "user", "content": "q"}, {"role": "tool"}]] * 2 and len(seen) == 1


def test_own_columns_of_a_row_win_over_those_that_every_row_has() -> None:
    def trl(completions: list[str], answer: list[str], data_source: list[str]) -> list[float]:
        seen.append((answer, data_source))
        return [0.0] * len(completions)

    seen: list[Any] = []
    row = dataclasses.replace(ROW, extra={"answer": "because 2 + 3 = 5"})
    wrap_function(trl).grade(row, TWO)
    assert seen == [(["because 2 + 3 = 5"] * 2, ["src"] * 2)]


def test_settings_win_over_columns_of_the_same_name() -> None:
    def trl(completions: list[str], level: int = 0, **columns: Any) -> list[float]: ...
    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float: ...

    (found,) = called(trl, [1.0, 2.0], {"level": 100})
    assert found["level"] == 100
    assert called(verl, kwargs={"extra_info": "mine"})[0]["extra_info"] == "mine"


@pytest.mark.parametrize(
    ("fn", "style"),
    [
        (lambda prompt, response: 1, "gspo"),
        (lambda a, b, c=1: 1, "gspo"),
        (lambda a, b=1: 1, "gspo"),
        (lambda a, b, *, c=1, **d: 1, "gspo"),
        (lambda solution_str: 1, "verl"),
        (lambda data_source, ground_truth: 1, "verl"),
        (lambda data_source, other: 1, "gspo"),
        (lambda solution_str, solution_strs: 1, "verl_batch"),
        (lambda completions: 1, "trl"),
        (lambda completions, prompts: 1, "trl"),
        (lambda prompt, completions: 1, "areal"),
        (lambda completions, prompt_ids: 1, "areal"),
        (lambda *args: 1, None),
        (lambda a, *, b=1: 1, None),
        (lambda a, b, c, d=1: 1, None),
    ],
)
def test_the_names_of_parameters_tell_the_signature(fn: Any, style: str | None) -> None:
    if style is None:
        with pytest.raises(RewardError, match="has an unknown signature"):
            detect_style(fn, "fn")
    else:
        assert detect_style(fn, "fn") == style


def test_a_third_parameter_may_be_set_and_none_that_does_not_exist() -> None:
    assert detect_style(lambda a, b, c: 1, "fn", ["c"]) == "gspo"
    assert detect_style(lambda a, b, **more: 1, "fn", ["c"]) == "gspo"
    with pytest.raises(RewardError, match=r"has no parameter 'd'; kwargs may set c, e, more$"):
        detect_style(lambda a, b, c=1, *args, e=2, more=3: 1, "fn", ["z", "d"])
    with pytest.raises(RewardError, match=r"kwargs may set none$"):
        detect_style(lambda a, b: 1, "fn", ["d"])
    with pytest.raises(RewardError, match="the signature of reward function fn cannot be read"):
        detect_style(type, "fn")


def test_a_list_may_be_an_array_and_an_empty_list_is_no_answer_for_two() -> None:
    def arrays(completions: list[str], **_: Any) -> Any:
        return np.asarray([0.25, 0.5])

    assert [r.score for r in wrap_function(arrays).grade(PROMPT, RESPONSES) if isinstance(r, Reward)] == [0.25, 0.5]
    graded = wrap_function(lambda completions, **_: []).grade(PROMPT, RESPONSES)
    assert all("it returned 0 values for 2 completions" in str(item) for item in graded)


def test_a_name_may_lead_into_a_class_and_every_public_name_is_offered(tmp_path: Any) -> None:
    file = tmp_path / "nested_reward.py"
    file.write_text(
        "class Group:\n    @staticmethod\n    def score(prompt, response, more=0):\n        return 3 + more\n"
        "def other(prompt, response): return 1\ndef also(): pass\ndef _hidden(): pass\nVALUE = 1\n"
    )
    spec = RewardSpec("Group.score", str(file), weight=0.5, kwargs={"more": 4})
    function = load_function(spec)
    assert function.weight == 0.5 and function.name == "Group.score"
    assert [r.score for r in function.grade(PROMPT, RESPONSES) if isinstance(r, Reward)] == [7, 7]
    with pytest.raises(RewardError, match=r"it has Group, also, other\. Choose one with `name`"):
        load_function(RewardSpec("Group.none", str(file)))
    with pytest.raises(RewardError, match=r"Choose one with custom_reward_function\.name"):
        load_function(RewardSpec("VALUE", str(file), key=CUSTOM))


def test_the_message_of_an_error_is_cut_and_its_last_part_kept() -> None:
    def raising(prompt: Prompt, response: str) -> float:
        raise ValueError("x" * 2000 + "end")

    failure = str(wrap_function(raising, name="mine").grade(PROMPT, [Response("a", index=3)])[0])
    head, _, trace = failure.partition("\n")
    assert head.endswith("response 3: ValueError: …" + "x" * 997 + "end") and "in raising" in trace


def test_a_response_knows_its_tokens_place_and_end() -> None:
    response = Response("abc", [1, 2, 3], 4, "length", [TURNS[0]])
    assert response == "abc" and response.num_tokens == 3
    assert (response.token_ids, response.index, response.finish_reason) == ((1, 2, 3), 4, "length")
    assert response.turns == (TURNS[0],)
    bare = Response("abc")
    assert (bare.token_ids, bare.index, bare.finish_reason, bare.turns) == ((), 0, "stop", ())


@pytest.mark.parametrize(("style", "whole"), [(ours, False), (verls, False), (areals, False), (trls, True)])
def test_only_functions_of_lists_need_the_whole_group(style: Any, whole: bool) -> None:
    assert wrap_function(style).needs_whole_group is whole
    assert wrap_function(functools.partial(style)).needs_whole_group is whole


def test_an_object_with_an_async_call_is_awaited_and_keeps_its_settings() -> None:
    class Judge:
        async def __call__(self, prompt: Prompt, response: str, bonus: float = 0.0) -> float:
            return len(response) + bonus

    function = wrap_function(Judge(), kwargs={"bonus": 10.0})
    assert function.needs_whole_group and function.name == "Judge"
    assert [r.score for r in function.grade(PROMPT, RESPONSES) if isinstance(r, Reward)] == [11, 13]
