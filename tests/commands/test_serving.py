"""`gspo chat`, `gspo generate`, `gspo push` and a real `gspo serve`, as they are typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from typer.testing import CliRunner, Result

from gspo import Trainer
from gspo.build.served.source import ModelSource
from gspo.checkpoint.folder import verify
from gspo.cli import app
from gspo.commands.serving.chat import Talk, _environment
from gspo.environments.builtin import Calculator
from gspo.environments.formats import TAG
from gspo.rollout.engine import SamplingParams
from gspo.serving.batcher import Batcher
from gspo.serving.parameters import Ask
from tests.serving.support import embedded
from tests.serving.test_tools import Scripted
from tests.support.small_run import config, even_first_byte, make_model

ON_CPU = ["--device", "cpu", "--max-model-len", "256"]


def run(*words: str, text: str = "") -> Result:
    return CliRunner().invoke(app, list(words), input=text)


def test_chat_answers_resets_and_ends() -> None:
    done = run(
        "chat", "embedded", "--temperature", "0", *ON_CPU, text="1+1=\n/system be brief\n1+1=\n/reset\n/what\n/quit\n"
    )
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 2
    assert "/reset begins again" in done.stderr


def test_chat_keeps_the_conversation_and_says_when_it_is_too_long() -> None:
    done = run("chat", "embedded", "--temperature", "0", *ON_CPU, text="1+" * 200 + "\n1+1=\n")
    assert done.exit_code == 0 and "256 tokens" in done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip()]) == 1


def test_tools_answer_in_a_chat() -> None:
    """A model that calls the calculator twice, since it always says the same, until the limit of turns."""
    import dataclasses

    opened = embedded()
    engine = Scripted("<tool>38*47</tool>", opened.tokenizer)
    reader = dataclasses.replace(opened.reader, tool_format=TAG)
    batcher = Batcher(engine, opened.decode)
    try:
        talk = Talk(
            dataclasses.replace(opened, reader=reader),
            batcher,
            Ask(SamplingParams(40), stream=True),
            Calculator(),
            None,
        )
        shown: list[str] = []
        talk.say("38*47=", shown.append)
    finally:
        batcher.close()
    assert [m["content"] for m in talk.messages if m["role"] == "tool"][:2] == ["1786", "1786"]
    asked = opened.tokenizer.decode(engine.asked[1].token_ids)
    assert asked == "<user>38*47=<assistant><tool>38*47</tool><result>1786</result>"
    assert "".join(shown).startswith("<tool>38*47</tool> [1786] ")


def test_a_chat_that_begins_again_has_a_new_environment_and_keeps_its_system_message() -> None:
    class Counted(Calculator):
        num_closed = 0

        def close(self) -> None:
            Counted.num_closed += 1

    made: list[Counted] = []

    def make() -> Counted:
        made.append(Counted())
        return made[-1]

    first = Counted()
    talk = Talk(embedded(), cast(Any, None), Ask(SamplingParams(4)), first, "Be brief.", make)
    assert talk._environment is first and not made
    for system, messages in ((None, ["Be brief."]), ("Count.", ["Count."]), (None, ["Count."]), ("", []), (None, [])):
        talk.messages.append({"role": "user", "content": "2+2="})
        talk.reset(system)
        assert talk._environment is made[-1] and [m["content"] for m in talk.messages] == messages
    assert len(made) == Counted.num_closed == 5
    alone = Talk(embedded(), cast(Any, None), Ask(SamplingParams(4)), None, None)
    alone.reset("Count.")
    assert [m["content"] for m in alone.messages] == ["Count."] and alone._environment is None


TOOLS = 'def double(number: int) -> int:\n    """Twice a number."""\n    return 2 * number\n'
PLUGIN = f"import gspo\n\n{TOOLS}\n\n@gspo.environment('doubling')\ndef make():\n    return [double]\n"


@pytest.mark.parametrize(
    ("settings", "tools"),
    [
        ({}, None),
        ({"environment.name": "calculator"}, ["calculator"]),
        ({"environment.name": "guess"}, None),  # without tools
        ({"environment.path": "{folder}/tools.py"}, ["double"]),
        ({"environment.name": "doubling", "trainer.plugins": ["{folder}/plugin.py"]}, ["double"]),
        ({"actor_rollout_ref.rollout.multi_turn.function_tool_path": "{folder}/tools.py"}, ["double"]),
    ],
)
def test_a_chat_has_the_tools_of_the_run_however_they_were_named(tmp_path: Path, monkeypatch, settings, tools) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    filled = json.loads(json.dumps(settings).replace("{folder}", str(tmp_path)))
    monkeypatch.setattr("gspo.build.served.source.find_source", lambda words: ModelSource(words, words, None, filled))
    make, found = _environment("run")
    assert (make is None) == (found is None) == (tools is None)
    if found is not None:
        assert [tool["function"]["name"] for tool in found.tools] == tools


def test_generate_answers_a_file_in_order(tmp_path: Path) -> None:
    lines = [f"{number}+{number}=" for number in range(9)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    answers = []
    for name in ("prompts.txt", "prompts.jsonl"):
        out = tmp_path / f"{name}.out"
        words = ["generate", "embedded", str(tmp_path / name), "--out", str(out), "--n", "2", "--max-tokens", "20"]
        done = run(*words, "--max-num-seqs", "4", *ON_CPU)
        assert done.exit_code == 0, done.output
        answers.append([json.loads(line) for line in out.read_text().splitlines()])
    assert [row["messages"][0]["content"] for row in answers[0]] == lines
    assert [row["responses"] for row in answers[0]] == [row["responses"] for row in answers[1]]
    assert all(len(row["responses"]) == 2 and row["responses"][0]["num_tokens"] for row in answers[0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "embedded", "missing.txt"], "missing.txt"),
        (["generate", "embedded", "arithmetic", "--max-tokens", "5000", "--limit", "1"], "--max-tokens 5000"),
        (["push", "embedded", "owner/name"], "no run folder"),
        (["push", "embedded", "name"], "owner/name"),
        (["serve", "no-such-folder/model", "--port", "0"], "no-such-folder/model"),
        (["serve", "embedded", "--port", "0", "--max-model-len", "99999"], "at most 2048"),
    ],
)
def test_what_is_refused(words: list[str], says: str) -> None:
    done = run(*words)
    assert done.exit_code == 2 and says in done.stderr


def test_push_exports_a_checkpoint_with_its_card(tmp_path: Path) -> None:
    from gspo.models.load import load_model

    resolved = config(tmp_path / "runs", make_model(tmp_path / "small"), "trainer.total_training_steps=1")
    Trainer(resolved, reward_fn=even_first_byte).fit()
    folder = tmp_path / "runs" / "run"
    (saved,) = (folder / "checkpoints").iterdir()
    assert "These weights are from step 1 of run" in (saved / "README.md").read_text() and verify(saved) is None
    done = run("push", str(folder), "owner/name", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "README.md" in done.stdout and "model.safetensors" in done.stdout and "optimizer" not in done.stdout
    for words in ("pipeline_tag: text-generation", "How to load", 'from_pretrained("owner/name")', "95 % interval"):
        assert words in done.stdout
    out = tmp_path / "new" / "model"
    assert run("push", str(folder), "owner/name", "--to", str(out)).exit_code == 0
    assert load_model(str(out)) is not None
    assert not (out / "training").exists() and (out / "README.md").read_text().startswith("---\nlibrary_name")
    assert run("push", str(folder), "owner/name", "--to", str(out)).exit_code == 2


def test_serve_answers_and_stops_when_told(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gspo", "serve", "embedded", "--port", "0", *ON_CPU]
    environment = {**os.environ, "GSPO_API_KEY": "secret-of-the-test", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            lines = []
            for line in server.stdout:
                lines.append(line)
                if found := re.search(r"at (http://127.0.0.1:\d+/v1)", line):
                    break
            client = openai.OpenAI(base_url=found.group(1), api_key="secret-of-the-test", max_retries=0)
            answer = client.chat.completions.create(
                model="embedded", messages=[{"role": "user", "content": "1+1="}], max_tokens=8
            )
            assert answer.choices[0].message.content is not None
            stream = client.completions.create(
                model="embedded", prompt="1", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            server.send_signal(signal.SIGINT)
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
            assert reasons[-1] == "length", "an open request is finished before the server stops"
            lines += server.stdout.readlines()
            assert server.wait(60) in (0, -signal.SIGINT, 128 + signal.SIGINT)
        finally:
            server.kill()
    assert "secret-of-the-test" not in "".join(lines)
