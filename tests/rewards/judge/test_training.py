"""Runs with a judge: the same bits as with the rule it agrees with, missing rewards, a dead server, kill -9."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.config import ResolvedConfig, load
from gspo.exit_codes import EXIT_REFUSED, EXIT_REWARDS_FAILED
from gspo.loop.run import run_program
from gspo.loop.trainer import Trainer
from gspo.rewards.judge import client
from gspo.rewards.judge.cache import question_key
from gspo.runs.console import Console
from gspo.runs.group_log import read_groups
from tests.support.judge_server import KEY, JudgeServer, even_first, judge_server, parts
from tests.support.small_run import config, even_first_byte, final_state, make_model


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("JUDGE_KEY", KEY)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server(even_first) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def with_judge(folder: Path, model: Path, server: JudgeServer, *words: str) -> ResolvedConfig:
    return config(
        folder,
        model,
        f"reward.judge.base_url={server.url}",
        "reward.judge.model=some-model",
        "reward.judge.kind=reference",
        "reward.judge.api_key_env=JUDGE_KEY",
        "reward.judge.retries=0",
        "reward.lag=1",
        "trainer.total_training_steps=3",
        *words,
    )


def fit(resolved: ResolvedConfig, **options: Any) -> dict[str, Any]:
    return Trainer(resolved, console=Console(enabled=False), **options).fit()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            yield file, gzip.decompress(data) if file.suffix == ".gz" else data


def test_a_judge_that_agrees_with_the_rule_trains_the_same_weights(
    tmp_path: Path, model: Path, server: JudgeServer
) -> None:
    words = ("reward.lag=1", "trainer.total_training_steps=2")
    fit(config(tmp_path / "rule", model, *words), reward_fn=even_first_byte)
    fit(with_judge(tmp_path / "judge", model, server, "trainer.total_training_steps=2"))
    rule, judged = (final_state(tmp_path / name / "run") for name in ("rule", "judge"))
    assert judged["weights"] == rule["weights"]
    last = rows(tmp_path / "judge")[-1]
    assert last["judge/failures"] == 0 and last["reward/reward/judge/mean"] == last["critic/score/mean"]
    assert sum(row.get("judge/calls", 0) for row in rows(tmp_path / "judge")) <= len(server.requests)
    assert 0 <= last["judge/disagreement"] <= 1  # the built-in rule of arithmetic is logged beside the judge
    assert "reward/reward/arithmetic/mean" in last
    groups = list(read_groups(tmp_path / "judge" / "run" / "groups" / "step-000001.jsonl.gz"))
    note = groups[0]["responses"][0]["notes"]["judge"]
    assert note["verdict"] in ("right", "wrong") and note["reason"].startswith("the answer begins with")
    assert note["tokens"] == 100 and note["seconds"] > 0
    leaks = [file for file, data in contents(tmp_path / "judge") if KEY.encode() in data]
    assert not leaks and server.keys[0] == f"Bearer {KEY}"


# How a judge may fail on a question, and what the response's record then says.
FAILURES = {
    "slow": "no reply within reward.judge.timeout=1 s",
    "500": "HTTP 500: ",
    "garbage": "the reply is not that of a chat",
    "no verdict": "the reply has no verdict",
    "refusing": "the judge refused: I cannot help with that.",
    "hangs up": "cannot be reached",
    "no choices": "the reply is not that of a chat",
    "brackets": "the reply is not that of a chat",
    "half a body": "cannot be reached",
    "not packed": "cannot be reached",
    "in a circle": "cannot be reached",
}


@pytest.mark.slow
def test_verdicts_are_right_wrong_or_missing_and_never_0_however_the_judge_fails(
    tmp_path: Path, model: Path, server: JudgeServer
) -> None:
    """One run on a server that treats each question in its own way."""
    modes = (*FAILURES, "wrong", "429 first", *("right",) * 12)
    treated: dict[tuple[str, str], str] = {}  # question and answer → mode

    def mode(body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        chosen = modes[drawn(body) % len(modes)] if len(server.requests) > 1 else "right"  # the first is a trial
        return treated.setdefault((parts(text, "question")[0], parts(text, "answer")[0]), chosen)

    server.mode = mode
    words = ("reward.judge.retries=1", "reward.judge.timeout=1", "reward.max_failure_rate=0.9", "trainer.test_freq=-1")
    no_evaluation = ("trainer.val_before_train=false", "trainer.val_after_train=false")
    fit(with_judge(tmp_path, model, server, *words, *no_evaluation))
    seen: set[str] = set()
    for file in sorted((tmp_path / "run" / "groups").glob("*.gz")):
        for group in read_groups(file):
            assert len(group["responses"]) == 4  # those without a verdict too
            for response in group["responses"]:
                treatment = treated[group["messages"][-1]["content"], response["text"]]
                right = float(bool(response["text"]) and ord(response["text"][0]) % 2 == 0)
                if treatment in FAILURES:
                    assert response["score"] is None and FAILURES[treatment] in response["failure"]
                else:
                    assert response["score"] == (1.0 - right if treatment == "wrong" else right)
                seen.add(treatment)
    assert seen == set(modes)


@pytest.mark.slow
@pytest.mark.parametrize(("end", "cause"), [("500", "HTTP 500"), ("hangs up", "cannot be reached")])
def test_a_server_that_dies_stops_the_run_with_its_cause_and_a_resume_goes_on(
    tmp_path: Path, model: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str], end: str, cause: str
) -> None:
    server.mode = lambda body: end if len(server.requests) > 40 else "right"
    assert run_program(with_judge(tmp_path, model, server)) == EXIT_REWARDS_FAILED
    output = "".join(capsys.readouterr())
    assert cause in output and "judge: some-model" in output
    server.mode = "right"
    assert run_program(with_judge(tmp_path, model, server)) == 0
    assert rows(tmp_path)[-1]["step"] == 3


@pytest.mark.parametrize(("mode", "cause"), [("401", "HTTP 401"), ("no verdict", "has no verdict")])
def test_a_judge_that_cannot_be_asked_ends_the_run_before_it_starts(
    tmp_path: Path, model: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str], mode: str, cause: str
) -> None:
    server.mode = mode
    assert run_program(with_judge(tmp_path, model, server)) != 0
    output = "".join(capsys.readouterr())
    assert cause in output and "tried on one row before the start" in output and KEY not in output


def test_rewards_add_up_by_configuration_within_a_budget_and_another_judge_evaluates(
    tmp_path: Path, model: Path, server: JudgeServer
) -> None:
    (tmp_path / "mine.py").write_text("def style(prompt, response):\n    return float(len(response))\n")
    functions = (
        "[{name: length, kwargs: {max_length: 320}, weight: 2}, {path: %s, name: style, weight: 0.25}, {judge: {}}]"
    )
    words = (
        f"reward.functions={functions % (tmp_path / 'mine.py')}",
        "reward.num_workers=1",
        "reward.judge.eval.model=other-model",
        "reward.judge.max_tokens_spent=500",
        "trainer.test_freq=1",
    )
    fit(with_judge(tmp_path, model, server, *words))
    assert rows(tmp_path)[-1]["step"] == 1  # of 3: the tokens are spent
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    assert {request["model"] for request in server.requests} == {"some-model", "other-model"}
    (record, *_) = read_groups(tmp_path / "run" / "evals" / "step-000001.jsonl.gz")
    assert record["responses"][0]["notes"]["judge"]["model"] == "other-model"
    for group in read_groups(tmp_path / "run" / "groups" / "step-000001.jsonl.gz"):
        for response in group["responses"]:
            parts = response["extra"]
            assert parts["reward/style"] == len(response["text"])
            weighted = 2 * parts["reward/length"] + 0.25 * parts["reward/style"] + parts["reward/judge"]
            assert response["score"] == pytest.approx(weighted)


def test_a_run_that_has_spent_its_budget_does_not_go_on_until_it_is_raised(
    tmp_path: Path, model: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("trainer.val_before_train=false", "trainer.val_after_train=false")
    for budget, last, asks in ((500, 1, True), (500, 1, False), (0, 3, True)):
        resolved = with_judge(tmp_path, model, server, *words, f"reward.judge.max_tokens_spent={budget}")
        asked = len(server.requests)
        assert run_program(resolved) == 0
        assert rows(tmp_path)[-1]["step"] == last
        said = "".join(capsys.readouterr())
        assert ("(reward.judge.max_tokens_spent=500); raise it to go on" in said) == (budget > 0)
        assert (len(server.requests) > asked) == asks
    assert (tmp_path / "run" / "result.json").is_file()


def test_odd_characters_of_a_judge_are_in_the_group_file_as_others_can_read_them(
    tmp_path: Path, model: Path, server: JudgeServer
) -> None:
    server.verdict = lambda text: even_first(text)[:-1] + r', "reason": "half \ud800 of one, a \u0000, a \u001b[2J"}'
    words = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.val_after_train=false")
    fit(with_judge(tmp_path, model, server, *words))
    (group, *_) = read_groups(tmp_path / "run" / "groups" / "step-000001.jsonl.gz")
    assert group["responses"][0]["notes"]["judge"]["reason"] == "half ? of one, a \0, a \x1b[2J"


@pytest.mark.parametrize(("key", "code"), [("sk-the-test\n", 0), ("sk-the\ntest", EXIT_REFUSED)])
def test_a_key_with_a_line_break_is_in_no_file_and_in_no_message(
    tmp_path: Path,
    model: Path,
    server: JudgeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    code: int,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    words = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.val_after_train=false")
    assert run_program(with_judge(tmp_path, model, server, *words)) == code
    assert "sk-the" not in "".join(capsys.readouterr()) and set(server.keys) <= {"Bearer sk-the-test"}
    assert not [file for file, data in contents(tmp_path) if b"sk-the" in data]


@pytest.mark.parametrize("inside", [True, False])
def test_runs_that_share_verdicts_count_their_own_tokens(
    tmp_path: Path, model: Path, server: JudgeServer, inside: bool
) -> None:
    words = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.val_after_train=false")
    shared = tmp_path / ("one/run" if inside else "shared") / "verdicts.sqlite"
    for name in ("one", "two"):
        fit(with_judge(tmp_path / name, model, server, *words, f"reward.judge.cache={shared}"))
    counts = [rows(tmp_path / name)[-1] for name in ("one", "two")]
    assert counts[0]["judge/calls"] > 5 and counts[1]["judge/calls"] == 0  # the same questions
    with contextlib.closing(sqlite3.connect(shared)) as db:
        spent = dict(db.execute("SELECT run, SUM(tokens) FROM spent GROUP BY run"))
    assert spent == {"" if inside else f"{(tmp_path / 'one' / 'run').resolve()} ": 100 * len(server.requests)}


@pytest.mark.slow
def test_the_start_model_judges_its_own_answers(tmp_path: Path) -> None:
    question = tmp_path / "question.txt"
    question.write_text("{response}+1+1=")
    words = ("reward.judge.base_url=policy", f"reward.judge.prompt={question}", "reward.judge.max_score=100000")
    words += ("reward.max_failure_rate=1.0", "trainer.total_training_steps=1", "data.train_batch_size=4")
    words += ("reward.judge.max_tokens=48", "trainer.val_before_train=false", "trainer.val_after_train=false")
    folder = [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=run", "trainer.num_threads=1"]
    trainer = Trainer(load(overrides=[*folder, *words]), console=Console(enabled=False))
    server = trainer.parts.judge
    assert server is not None and not server.has_ended()
    trainer.fit()
    assert server.has_ended()
    groups = read_groups(tmp_path / "run" / "groups" / "step-000001.jsonl.gz")
    judged = [r["notes"]["judge"]["model"] for g in groups for r in g["responses"] if r["score"] is not None]
    assert judged and set(judged) == {"policy"}


CHILD = """
import sys
from pathlib import Path
from gspo.loop.run import run_program
from gspo.rewards.judge import client
from gspo.rewards.judge.cache import question_key
from tests.rewards.judge.test_training import with_judge
client.FIRST_WAIT = 0.01
class Server: url = sys.argv[3]
sys.exit(run_program(with_judge(Path(sys.argv[1]), Path(sys.argv[2]), Server)))
"""


def drawn(body: dict[str, Any]) -> int:
    """A number that depends on the question alone."""
    return hashlib.sha256(body["messages"][-1]["content"].encode()).digest()[0]


def kept_replies(run: Path) -> set[str]:
    """The questions whose replies a run has on disk."""
    with contextlib.closing(sqlite3.connect(run / "judge-cache.sqlite")) as db:
        return {key for (key,) in db.execute("SELECT key FROM verdicts")}


@pytest.mark.slow
def test_kill_9_and_resume_give_the_same_bits_from_the_cache(tmp_path: Path, model: Path, server: JudgeServer) -> None:
    """A reply that is on disk when a run is killed is never asked for again: the server would then give the opposite."""
    replies: set[str] = set()
    asked_again = 0

    def mode(body: dict[str, Any]) -> str:
        nonlocal asked_again
        sampling = {name: body[name] for name in ("temperature", "max_tokens")}
        key = question_key(body["model"], body["messages"], sampling)
        asked_again += key in replies
        if key in replies:
            return "wrong"
        return "500" if drawn(body) % 15 == 0 else "right"

    server.mode = mode
    child = [sys.executable, "-c", CHILD]
    subprocess.run([*child, str(tmp_path / "straight"), str(model), server.url], check=True)
    total = len(server.requests)

    codes, run = [], tmp_path / "killed" / "run"
    for limit in (total // 3, total // 3, 10**9):
        server.requests.clear()
        process = subprocess.Popen([*child, str(tmp_path / "killed"), str(model), server.url])
        while process.poll() is None and len(server.requests) < limit:
            time.sleep(0.002)
        if process.poll() is None:
            process.kill()
        codes.append(process.wait())
        replies = kept_replies(run)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0] and asked_again == 0
    one, other = (comparable(tmp_path / name / "run") for name in ("straight", "killed"))
    assert one == other
    assert sum(row.get("train/reward_failures", 0) for row in one["rows"]) > 0


def comparable(run: Path) -> dict[str, Any]:
    """All that a run must reproduce, without times and without what was asked instead of read."""
    work = (
        "judge/calls",
        "judge/cache_hits",
        "judge/failures",
        "judge/tokens",
        "judge/seconds",
        "timing_s/",
        "perf/",
        "rollout/",
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    groups = [group for file in sorted((run / "groups").glob("*.gz")) for group in read_groups(file)]
    for response in (r for group in groups for r in group["responses"]):
        for note in response.get("notes", {}).values():
            note.pop("seconds")
    return {
        "weights": final_state(run)["weights"],
        "rows": [{k: v for k, v in line.items() if not k.startswith(work)} for line in lines],
        "groups": groups,
    }
