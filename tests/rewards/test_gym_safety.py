"""What keeps answers to reasoning-gym's tasks from doing anything: the expressions that are read, the actions refused."""

from __future__ import annotations

import os

import pytest

from gspo.rewards.graders import reasoning_gym
from gspo.rewards.graders.reasoning_gym import _audit, _evaluates_answers, _parse_expression


def parsed(text: str) -> bool:
    try:
        return _parse_expression(lambda *args, **options: (args, options) == ((text, 1), {"a": 2}), text, 1, a=2)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ("x**2 + 3*y", "x**2 + 3*xy"),
        ("x1 + y", "x12 + y"),
        ("sqrt(x) + Abs(y)", "sqrt(x) + getattr(y)"),
        ("2.5*x", "x.real"),
        ("2.*x", "2. real"),
        ("(1, 2)", "[1, 2]"),
        ("x != 3", "x == '3'"),
        ("x" + " + 1" * 249, "x" + " + 1" * 250),  # 997 and 1,001 characters
        ("+".join("x**2" for _ in range(40)), "+".join("x**2" for _ in range(41))),
        ("x**9", "9**9**9"),
        ("x", "x__"),
        ("pi*E*I", "exec"),
        ("2^99", "2^100"),
    ],
)
def test_only_expressions_of_known_names_and_tame_powers_are_read(accepted: str, refused: str) -> None:
    assert parsed(accepted) and not parsed(refused)


@pytest.mark.parametrize(
    ("event", "args", "allowed"),
    [
        ("open", ("f", "r", os.O_RDONLY), True),
        ("open", ("f", "w", os.O_WRONLY), False),
        ("open", ("f", "w", os.O_RDWR | os.O_CREAT), False),
        ("open", ("f", "r"), True),
        ("open", ("f", "r", None), True),
        ("os.system", ("x",), False),
        ("os.posix_spawn", (), False),
        ("os.remove", ("f",), False),
        ("os.listdir", ("f",), True),
        ("subprocess.Popen", (), False),
        ("socket.connect", (), False),
        ("ctypes.dlopen", (), False),
        ("import", ("math",), True),
        ("mysubprocess.Popen", (), True),
    ],
)
def test_actions_are_refused_only_while_an_answer_is_scored(
    event: str, args: tuple[object, ...], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _audit(event, args)
    monkeypatch.setattr(reasoning_gym, "_guarding", True)
    if allowed:
        _audit(event, args)
    else:
        with pytest.raises(PermissionError, match=f"an answer may not cause {event}"):
            _audit(event, args)


def test_modules_whose_scorers_evaluate_answers_are_found() -> None:
    class Evaluating:
        def score_answer(self, answer: str) -> float:
            return float(eval(answer))

    class Plain:
        def score_answer(self, answer: str) -> float:
            return float(answer)

        def other(self, answer: str) -> object:
            return eval(answer)

    def module(*classes: object) -> object:
        return type("Module", (), {f"name{i}": item for i, item in enumerate(classes)})

    assert _evaluates_answers(module(Plain, 3, Evaluating))
    assert not _evaluates_answers(module(Plain, 3)) and not _evaluates_answers(module())
