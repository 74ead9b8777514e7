"""`gspo rewards try` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.commands.rewards import app
from gspo.rewards.benchmark import WORKLOADS, Workload
from gspo.rewards.compose import Grader, as_specs
from gspo.rewards.judge.cache import VerdictCache
from gspo.rewards.scoring import responses_of
from tests.support.judge_server import KEY, judge_server

REWARD = "def score(prompt, response):\n    return {'score': len(response), 'acc': 1, 'words': len(response.split())}\n"


def run(*arguments: str, stdin: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments], input=stdin)
    return result.exit_code, result.output


def first_sum() -> str:
    from gspo.data.tasks.arithmetic import load_arithmetic

    return str(load_arithmetic("train", limit=1)[0].ground_truth)


def test_a_right_and_a_wrong_answer(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_text(first_sum())
    code, output = run("try", "--task", "arithmetic", "--answer", str(file))
    assert code == 0 and "score      1" in output and f"truth      {first_sum()}" in output
    code, output = run("try", "--task", "arithmetic", "--answer", "-", stdin="x")
    assert code == 0 and "score      0" in output


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    code, output = run("try", "--task", "arithmetic", "--reward", f"{file}:score", "--answer", "-", stdin="one two")
    assert code == 0 and "score      7" in output and "words      2" in output


def test_an_answer_that_is_not_utf_8_is_refused_and_a_missing_reward_model_is_said(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_bytes("größer".encode("latin-1"))
    code, output = run("try", "--task", "arithmetic", "--answer", str(file))
    assert code == 2 and f"--answer {file}: is not UTF-8" in output
    keys = ["reward_model.enable=true", "reward_model.path=org/rm"]
    code, output = run("try", "--task", "arithmetic", "--answer", "-", *keys, stdin=first_sum())
    assert code == 0 and "the reward model is not loaded here" in output
    code, output = run("try", "--task", "arithmetic", "--answer", "-", stdin=first_sum())
    assert code == 0 and "reward model" not in output


def test_a_failing_function_is_reported_with_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response):\n    return 1 / 0\n")
    code, output = run("try", "--task", "arithmetic", "--reward", f"{file}:score", "--answer", "-", stdin="x")
    assert code == 1 and "ZeroDivisionError" in output and "mine.py" in output and "arithmetic/train/0" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "no_such_task", "--answer", "-"], "no_such_task"),
        (["--task", "arithmetic", "--answer", "/no/such/file"], "/no/such/file"),
        (["--task", "arithmetic", "--answer", "-", "--reward", "nothing"], "no built-in reward 'nothing'"),
        (["--task", "arithmetic", "--answer", "-", "--reward", "/no/file.py:f"], "there is no such file"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str) -> None:
    code, output = run("try", *arguments, stdin="1")
    assert code == 2 and message in output


def test_the_benchmark_grades_every_workload() -> None:
    code, output = run("bench", "--seconds", "0.1", "--workers", "1")
    lines = {line[:28].strip(): line for line in output.splitlines()}
    assert code == 0 and all(workload.name in lines for workload in WORKLOADS)
    assert all(float(lines[w.name][28:].split()[0]) > 0 and "failed" not in lines[w.name] for w in WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_answers_of_the_benchmark_are_right_and_wrong(workload: Workload) -> None:
    grader = Grader(as_specs(None))
    for group in workload.groups():
        graded = grader.grade(group.prompt, responses_of(group))
        assert [getattr(reward, "score", reward) for reward in graded] == [1.0, 0.0] * 4, group.prompt


def test_the_keys_of_data_and_reward_are_those_of_training(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "How many?", "solution": "7"}\n')
    keys = ["data.prompt_key=question", "data.ground_truth_key=solution"]
    code, output = run("try", "--task", str(rows), *keys, "--reward", "exact", "--answer", "-", stdin="7")
    assert code == 0 and "score      1" in output and "How many?" in output
    mine = tmp_path / "mine.py"
    mine.write_text(REWARD)
    custom = [f"custom_reward_function.path={mine}", "custom_reward_function.name=score"]
    code, output = run("try", "--task", str(rows), *keys, *custom, "--answer", "-", stdin="one two")
    assert code == 0 and "words      2" in output


def test_what_a_judge_said_is_shown_and_why_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server() as server:
        keys = [f"reward.judge.base_url={server.url}", "reward.judge.model=m", "reward.judge.kind=reference"]
        keys += ["reward.judge.retries=0", "reward.judge.api_key_env=JUDGE_KEY"]
        asked = ["try", "--task", "arithmetic", "--answer", "-", *keys]
        code, output = run(*asked, stdin=first_sum())
        assert code == 0 and "judge      verdict: right\njudge      reason: compared\n" in output
        assert "score      1\n" in output and "reward/judge 1\n" in output and "reward/arithmetic 1\n" in output
        code, output = run(*asked, stdin="x")
        assert code == 0 and "score      0\n" in output and "judge      verdict: wrong\n" in output
        server.mode = "401"
        code, output = run(*asked, stdin="y")
        assert code == 1 and "reward     none: judge: m: HTTP 401" in output and KEY not in output

        def broken(self: VerdictCache, key: str) -> None:
            raise OSError(5, "the verdicts of the judge cannot be kept: it is damaged", "verdicts")

        monkeypatch.setattr(VerdictCache, "find", broken)
        code, output = run(*asked, stdin="z")
        assert code == 2 and "cannot be kept: it is damaged" in output


def test_length_says_which_argument_it_needs() -> None:
    code, output = run("try", "--task", "arithmetic", "--reward", "length", "--answer", "-", stdin="7")
    assert code != 0 and "needs max_length" in output and "kwargs: {max_length: 512}" in output
