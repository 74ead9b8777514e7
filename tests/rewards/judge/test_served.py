"""`gspo serve embedded` as a judge: the real client, the real server, a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo.config import load
from gspo.loop.trainer import Trainer
from gspo.rewards.judge.cache import VerdictCache
from gspo.rewards.judge.scorer import JudgeScorer
from gspo.rewards.judge.settings import JudgeSettings
from gspo.runs.console import Console
from gspo.runs.group_log import read_groups
from gspo.types import Group, Prompt, Rollout
from tests.serving.support import KEY, Running, embedded, running

PROMPT = Prompt("row", ({"role": "user", "content": "a sum"},), ())


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(embedded()) as started:
        yield started


def direct_answer(server: Running, text: str) -> str | None:
    """What the model says to a text, asked without the judge."""
    chat = server.client().chat.completions.create(
        model="embedded", temperature=0, max_tokens=48, messages=[{"role": "user", "content": text}]
    )
    return chat.choices[0].message.content


def test_the_embedded_model_judges_and_equal_texts_cost_one_call(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    settings = JudgeSettings(
        f"{server.url}/v1",
        "embedded",
        kind="score",
        prompt="{response}",
        max_score=1000,
        max_tokens=48,
        api_key_env="JUDGE_KEY",
    )
    scorer = JudgeScorer(settings, VerdictCache())
    texts = ("20+30+1=", "5+5+5=", "20+30+1=")
    scorer.submit(Group(PROMPT, tuple(Rollout((), (), (), (), "stop", text=text) for text in texts), 0, 0))
    done = scorer.collect()[0].rollouts
    calls = scorer.observe()["judge/calls"].result()
    scorer.close()
    assert calls == 2
    answers = [direct_answer(server, text) for text in texts]
    for rollout, answer in zip(done, answers):
        if answer is not None and answer.isdigit():
            assert rollout.reward is not None and rollout.reward.score == int(answer) / 1000
            assert rollout.reward.notes["verdict"] == int(answer) and rollout.reward.notes["tokens"] > 8
        else:  # worked out: not a bare number
            assert rollout.reward is None and "has no verdict" in str(rollout.failure)
    assert done[0].reward == done[2].reward and any(answer and answer.isdigit() for answer in answers)


@pytest.mark.slow
def test_a_run_is_judged_by_the_served_model(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    question = tmp_path / "question.txt"
    question.write_text("{response}+1+1=")
    config = load(
        overrides=[
            f"trainer.default_local_dir={tmp_path}",
            "trainer.experiment_name=run",
            "trainer.total_training_steps=1",
            "trainer.num_threads=1",
            "trainer.val_before_train=false",
            "trainer.val_after_train=false",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"reward.judge.base_url={server.url}/v1",
            "reward.judge.model=embedded",
            "reward.judge.api_key_env=JUDGE_KEY",
            f"reward.judge.prompt={question}",
            "reward.judge.max_score=100000",
            "reward.judge.max_tokens=48",
            "reward.max_failure_rate=1.0",
        ]
    )
    Trainer(config, console=Console(enabled=False)).fit()
    groups = list(read_groups(tmp_path / "run" / "groups" / "step-000001.jsonl.gz"))
    verdicts = [
        (response["text"], response["score"], response["notes"]["judge"]["verdict"])
        for group in groups
        for response in group["responses"]
        if response["score"] is not None
    ]
    assert len(verdicts) >= 8
    by_text = {text: score for text, score, _ in verdicts}
    assert all(score == said / 100000 == by_text[text] for text, score, said in verdicts)
