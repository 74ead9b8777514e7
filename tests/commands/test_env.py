"""`gspo env`: environments are listed, shown and played in the terminal."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gspo.cli import app


def run(*words: str, lines: str = "") -> str:
    done = CliRunner().invoke(app, ["env", *words], input=lines)
    assert done.exit_code == 0, done.output
    return done.output


def test_list_and_show() -> None:
    assert {line.split()[0] for line in run("list").splitlines()} >= {
        "calculator",
        "guess",
        "python",
        "gridworld",
        "gsm8k",
    }
    shown = run("show", "calculator")
    assert "format     tag" in shown and '"name": "calculator"' in shown


def test_an_episode_is_played_by_hand() -> None:
    played = run("try", "guess", "--kwargs", '{"high": 1}', "--task", "guess", lines="70\n0\n")
    assert "prompt: 1-64?" in played and "environment: lower" in played and "environment: higher" in played
    assert played.endswith("total reward: -0.1\n")
    walked = run("try", "gridworld", "--kwargs", '{"size": 2, "num_walls": 0}', lines="right\ndown\nleft\n")
    assert "reward: 1" in walked
    asked = run("try", "calculator", lines="<tool>6*7</tool>\n42\n")
    assert "environment: 42" in asked


def test_a_model_plays() -> None:
    played = run("try", "calculator", "--model", "embedded", "--max-tokens", "12")
    assert "model: " in played and "ended: " in played


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "gess"], "did you mean 'guess'"),
        (["show", "guess", "--kwargs", "x"], "--kwargs x: expected JSON"),
        (["show", "guess", "--kwargs", "[1]"], "--kwargs [1]: expected an object"),
        (["try", "guess", "--kwargs", "[1]"], "--kwargs [1]: expected an object"),
        (["show", "guess", "--kwargs", '{"hihg": 1}'], "hihg"),
        (["try", "guess", "--kwargs", '{"hihg": 1}'], "hihg"),
        (["list", "--plugin", "nowhere.py"], "nowhere.py"),
        (["show", "guess", "--plugin", "nowhere.py"], "nowhere.py"),
        (["try", "guess", "--plugin", "nowhere.py"], "nowhere.py"),
        (["show", "nowhere.py:Thing"], "nowhere.py"),
        (["try", "calculator", "--model", "./nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_refused_by_name(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["env", *words])
    assert done.exit_code == 2 and says in done.output and done.output.startswith("error: ")


def test_an_unknown_name_is_refused() -> None:
    done = CliRunner().invoke(app, ["env", "try", "gess"])
    assert done.exit_code == 2 and "did you mean 'guess'" in done.output
