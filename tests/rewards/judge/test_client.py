"""The client of a judge without a server: attempts and the waits between them, replies read from bodies, rubric."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.rewards.judge import client
from gspo.rewards.judge.cache import Reply, VerdictCache
from gspo.rewards.judge.client import ChatClient, JudgeFailure, RateLimit
from gspo.rewards.judge.settings import Criterion, JudgeSettings, read_rubric
from gspo.rewards.protocol import RewardError
from gspo.types import Group, Prompt, Rollout
from tests.rewards.judge.answering import Answering, groups

KEY = "sk-the-key"


class Scripted(ChatClient):
    """A client whose attempts end as a script says: with a reply, or with a failure."""

    def __init__(self, *script: Any, **settings: Any) -> None:
        super().__init__(JudgeSettings("http://h", "m", **settings))
        self.script, self.waits = list(script), []

    async def _attempt(self, messages: Any, sampling: Any) -> Reply:
        self.num_calls += 1
        end = self.script.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def answer(self, monkeypatch: pytest.MonkeyPatch) -> Reply | str:
        async def sleep(seconds: float) -> None:
            if seconds:
                self.waits.append(seconds)

        with monkeypatch.context() as patch:
            patch.setattr(client.asyncio, "sleep", sleep)
            try:
                return asyncio.run(self.ask([], {}))
            except JudgeFailure as failure:
                return f"{failure} [{failure.tokens}]"


def failed(retry: bool = True, wait: float | None = None, tokens: int = 0) -> JudgeFailure:
    return JudgeFailure("down", retry=retry, wait=wait, tokens=tokens)


GOOD = Reply("yes", 3, 0.5)


@pytest.mark.parametrize(
    ("script", "retries", "answer", "waits"),
    [
        ([GOOD], 0, GOOD, []),
        ([failed()], 0, "down [0]", []),
        ([failed(), GOOD], 1, GOOD, [0.5]),
        ([failed(), failed(tokens=7)], 1, "down (2 attempts) [7]", [0.5]),
        ([failed(retry=False)], 4, "down [0]", []),
        ([failed(), failed(retry=False)], 4, "down (2 attempts) [0]", [0.5]),
        ([failed()] * 4 + [GOOD], 4, GOOD, [0.5, 1.0, 2.0, 4.0]),
        ([failed()] * 8 + [GOOD], 8, GOOD, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        ([failed(wait=7.0), failed(), failed(wait=0.0), failed(), GOOD], 4, GOOD, [7.0, 1.0, 4.0]),
        ([failed(wait=601.0), GOOD], 1, GOOD, [600.0]),
    ],
)
def test_attempts_and_the_waits_between_them(
    script: list[Any], retries: int, answer: Any, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Scripted(*script, retries=retries)
    assert asked.answer(monkeypatch) == answer
    assert asked.waits == waits and asked.num_calls == len(script) and asked.script == []


def read(body: Any, monkeypatch: pytest.MonkeyPatch) -> Reply | str:
    """What becomes of the body of a reply that arrived, in pieces; a text is sent as it is."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    data = (body if isinstance(body, str) else json.dumps(body)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    @asynccontextmanager
    async def create(**_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(iter_bytes=pieces)

    asked = ChatClient(JudgeSettings("http://h", "m", api_key_env="JUDGE_KEY", retries=3, max_tokens=9))
    completions = SimpleNamespace(with_streaming_response=SimpleNamespace(create=create))
    asked._client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    try:
        reply = asyncio.run(asked.ask([], {}))
    except JudgeFailure as failure:
        assert asked.num_calls == 1  # what was answered is not asked again
        return f"{failure} [{failure.tokens}]"
    return Reply(reply.text, reply.tokens, 0.0)


def body(finish: str = "stop", usage: Any = None, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": finish}, {"message": {"content": "2"}}], "usage": usage}


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (body(content="yes", usage={"total_tokens": 7}), Reply("yes", 7, 0.0)),
        (body(content="yes"), Reply("yes", 0, 0.0)),
        (body(content="yes", usage={"total_tokens": None}), Reply("yes", 0, 0.0)),
        (body(content=""), Reply("", 0, 0.0)),
        (body(content=f"my key is {KEY}, {KEY}"), Reply("my key is ***, ***", 0, 0.0)),
        (body(content=None, usage={"total_tokens": 7}), "the reply has no text [7]"),
        (body(content="no", refusal=f"never, {KEY}", usage={"total_tokens": 7}), "the judge refused: never, *** [7]"),
        (body("content_filter", content="no"), "the judge refused: finish_reason content_filter [0]"),
        (body(content="no", refusal="x" * 600), f"the judge refused: {'x' * 500} [0]"),
        ({"choices": []}, "the reply is not that of a chat: {'choices': []} [0]"),
        ([], "the reply is not that of a chat: [] [0]"),
        (body(content="x", usage={"total_tokens": "many"}), "the reply is not that of a chat"),
        (body(content="x", usage=[1]), "the reply is not that of a chat"),
        (body(content="x", usage={"total_tokens": float("inf")}), "the reply is not that of a chat"),
        (body(content="x", usage={"total_tokens": 10**30}), "the reply is not that of a chat"),
        (body(content="x", usage={"total_tokens": -1}), "the reply is not that of a chat"),
        ('{"choices": [{"mess', "the reply is not that of a chat: Unterminated string"),
        ("", "the reply is not that of a chat: Expecting value"),
        ("[" * 10_000 + "]" * 10_000, "the reply is not that of a chat: "),
        ('{"choices": %s}' % ("9" * 5000), "the reply is not that of a chat: Exceeds the limit"),
        (" " * (8 * 2**20 + 1), "the reply is larger than 8 MiB [0]"),
        (body(content="half \ud800 of one"), Reply("half ? of one", 0, 0.0)),
        (body(content=None, refusal="\ud800 \x1b[2J"), r"the judge refused: ? \x1b[2J [0]"),
        (body(content=None, refusal="x" * 495 + KEY), f"the judge refused: {'x' * 495}*** [0]"),  # hidden, then cut
        (
            body("length", content="1", usage={"total_tokens": 7}),
            "the reply was cut at reward.judge.max_tokens=9: 1 [7]",
        ),
        (body("length", content='{"score": 3} or {"score": 1'), "the reply was cut at reward.judge.max_tokens=9"),
        (body("length", content='{"score": 3} and so on'), Reply('{"score": 3} and so on', 0, 0.0)),
    ],
)
def test_what_the_body_of_a_reply_says(sent: Any, wanted: Reply | str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(sent, monkeypatch)
    assert found == wanted or (isinstance(found, str) and isinstance(wanted, str) and found.startswith(wanted))


@pytest.mark.parametrize(
    ("status", "header", "retry", "wait"),
    [
        (408, None, True, None),
        (409, "3", True, 3.0),
        (425, None, True, None),
        (429, "0.5", True, 0.5),
        (500, None, True, None),
        (503, "soon", True, None),
        (400, "3", False, 3.0),
        (404, None, False, None),
        (499, None, False, None),
    ],
)
def test_which_refusals_may_pass(status: int, header: str | None, retry: bool, wait: float | None) -> None:
    asked = ChatClient(JudgeSettings("http://h", "m", api_key_env=""))
    headers = {} if header is None else {"retry-after": header}
    response = SimpleNamespace(headers=headers, text=f"  {'x' * 600}  ")
    failure = asked._refused(SimpleNamespace(status_code=status, response=response))
    assert (failure.retry, failure.wait) == (retry, wait) and str(failure) == f"HTTP {status}: {'x' * 500}"


def test_limits_per_minute_with_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    limit = RateLimit(30)  # one in two seconds
    assert [limit.delay(1), limit.delay(2), limit.delay(1)] == [0.0, 2.0, 6.0]
    now[0] = 107.0
    assert limit.delay(0) == 1.0
    now[0] = 200.0
    assert limit.delay(1) == 0.0  # what was not used is not saved up
    limit.use(3)
    assert limit.delay(0) == 8.0
    now[0] = 300.0
    limit.use(1)
    assert limit.delay(0) == 2.0


def test_a_call_waits_for_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.time, "monotonic", lambda: 100.0)
    asked = Scripted(GOOD, GOOD, GOOD, GOOD, requests_per_minute=60, tokens_per_minute=600)
    asked._tokens.use(20)
    assert [asked.answer(monkeypatch) for _ in range(4)] == [GOOD] * 4
    assert asked.waits == pytest.approx([2.0, 2.3, 2.6, 3.0])  # 3 tokens each are 0.3 s, a call is 1 s; the longer one


def test_calls_at_once_share_the_tokens_of_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is expected to use what its question, or the mean of those before, says; a failed one gives it back."""
    now = [100.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    script = [*[Reply("yes", 50, 0.5)] * 3, failed(retry=False), *[Reply("yes", 50, 0.5)] * 2]
    asked = Scripted(*script, tokens_per_minute=600)
    question = [{"role": "user", "content": "x" * 400}]

    let_others_run = asyncio.sleep

    async def sleep(seconds: float) -> None:
        asked.waits.append(seconds)
        await let_others_run(0)

    async def ask(num: int) -> None:
        await asyncio.gather(*(asked.ask(question, {}) for _ in range(num)), return_exceptions=True)

    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    asyncio.run(ask(3))
    assert asked.waits == [0.0, 10.0, 20.0]  # 100 tokens each
    now[0], asked.waits = 200.0, []
    asyncio.run(ask(3))
    assert asked.waits == [0.0, 5.0, 10.0]  # 50 each, as before
    assert asked._tokens.delay(0) == 10.0  # one of them failed


@pytest.mark.parametrize("key", ["sk-\nthe-key", "sk-…", "sk-schl\u00fcssel", "\x01sk-the-key"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(RewardError, match=r"the variable JUDGE_KEY \(reward.judge.api_key_env\) is no key") as caught:
        ChatClient(JudgeSettings("http://h", "m", api_key_env="JUDGE_KEY"))
    assert key not in str(caught.value) and "the-key" not in str(caught.value)


def test_spaces_around_a_key_are_no_part_of_it_and_a_placeholder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, text, shown in (
        (f" {KEY}\n", f"it is {KEY}", "it is ***"),
        ("EMPTY", "EMPTY", "EMPTY"),
        ("5", '{"score": 5}', '{"score": 5}'),
        ("12345678", "12345678", "***"),
    ):
        monkeypatch.setenv("JUDGE_KEY", given)
        assert ChatClient(JudgeSettings("http://h", "m", api_key_env="JUDGE_KEY")).hide(text) == shown


def test_the_deadline_is_that_of_the_attempt_alone() -> None:
    asked = ChatClient(JudgeSettings("http://127.0.0.1:9/v1", "m", api_key_env="", retries=0, timeout=900))
    with pytest.raises(JudgeFailure, match="cannot be reached"):
        asyncio.run(asked.ask([], {}))
    assert asked._client.timeout.read is None and asked._client.timeout.connect == 5.0


def test_an_address_that_cannot_be_read_is_a_failure() -> None:
    for url in ("http://h:abc/v1", "http://127.0.0.1:99999/v1", "http://[::1/v1"):
        asked = ChatClient(JudgeSettings(url, "m", api_key_env="", retries=0))
        with pytest.raises(JudgeFailure, match=r"^http://.* cannot be reached: \w+: "):
            asyncio.run(asked.ask([], {}))


def test_samples_are_asked_for_with_seeds_and_give_medians_of_scores_and_criteria() -> None:
    rubric = (Criterion("a", "A?", 1.0, ("no", "so", "yes")), Criterion("b", "B?", 3.0, ("no", "yes")))
    said = ['{"a": "no", "b": "yes"}', '{"a": "yes", "b": "yes", "reason": "x"}', '{"a": "so", "b": "no"}']
    scorer = Answering(
        lambda text, sampling: said[sampling["seed"]],
        kind="rubric",
        rubric=rubric,
        samples=3,
        temperature=0.5,
        max_tokens=9,
    )
    (group,) = groups(("x",))
    scorer.submit(group)
    (done,) = scorer.collect()
    reward = done.rollouts[0].reward
    scorer.close()
    assert sorted(scorer.asked, key=lambda s: s["seed"]) == [
        {"temperature": 0.5, "max_tokens": 9, "seed": i} for i in range(3)
    ]
    assert reward is not None and (reward.score, reward.acc) == (0.75, None)
    assert reward.noise == 1.0 - 0.125 and reward.extra == {"judge/a": 0.5, "judge/b": 1.0}
    assert reward.notes == {
        "verdict": [{"a": "no", "b": "yes"}, {"a": "yes", "b": "yes"}, {"a": "so", "b": "no"}],
        "reason": "",
        "model": "m",
        "tokens": 30,
        "seconds": 1.5,
    }


def test_one_failed_sample_is_a_missing_reward_and_greedy_samples_have_no_seed() -> None:
    def answer(text: str, sampling: Any) -> Any:
        return JudgeFailure("down", tokens=4) if "bad" in text else '{"score": 5}'

    scorer = Answering(answer, kind="score", samples=1)
    first, second = groups(("bad", "good", "bad"), ("good",))
    scorer.submit(first)
    scorer.submit(second)
    done = [*scorer.collect(1), *scorer.collect()]
    counts = {name: metric.result() for name, metric in scorer.observe().items()}
    again = {name: metric.result() for name, metric in scorer.observe().items()}
    spent = scorer.cache.spent()
    scorer.close()
    found = [r.failure or r.reward.score for group in done for r in group.rollouts if r.failure or r.reward]
    assert found == ["m: down", 0.5, "m: down", 0.5]
    assert all("seed" not in sampling for sampling in scorer.asked) and spent == 14
    assert counts == {
        "judge/calls": 2,
        "judge/cache_hits": 1,
        "judge/failures": 1,
        "judge/tokens": 14,
        "judge/seconds": 0.5,
    }
    assert set(again.values()) == {0.0} and set(again) == set(counts)


def test_failures_are_repeated_only_for_their_own_group_version_and_scope() -> None:
    cache, down = VerdictCache(), [True]

    def answer(text: str, sampling: Any) -> Any:
        return JudgeFailure("down") if down[0] else '{"score": 10}'

    scorer = Answering(answer, kind="score", cache=cache)

    def score(number: int, version: int = 0, scope: str = "train") -> float | None:
        scorer._scope = scope
        scorer.submit(groups(("x",), ("x",), version=version)[number])
        reward = scorer.collect()[0].rollouts[0].reward
        return None if reward is None else reward.score

    assert score(0) is None
    down[0] = False
    assert score(0) is None
    assert [score(1), score(0, version=1), score(0, scope="eval")] == [1.0] * 3
    scorer.close()


def test_a_ranking_is_asked_about_sorted_texts_and_places_go_to_their_responses() -> None:
    scorer = Answering(lambda text, sampling: '{"ranking": [3, 1, 2]}', kind="rank")
    for group in groups(("b", "c", "a", "b"), ("x",), ("y", "y")):
        scorer.submit(group)
    ranked, single, equal = ([r.reward for r in group.rollouts] for group in scorer.collect())
    scorer.close()
    assert [reward.score for reward in ranked if reward] == [0.0, 1.0, 0.5, 0.0]
    assert single == [None]  # a ranking of three is no verdict on one
    assert [(reward.score, reward.notes["verdict"]) for reward in equal if reward] == [
        (0.5, "all answers are equal")
    ] * 2
    assert len(scorer.asked) == 2


def test_only_a_comparison_with_the_truth_is_an_accuracy_and_the_budget_ends_a_run_at_its_limit() -> None:
    scorer = Answering(lambda text, sampling: '{"verdict": "right"}', kind="reference", max_tokens_spent=20)
    for number, group in enumerate(groups(("a",), ("b",))):
        assert scorer.over_budget() is None
        scorer.submit(group)
        reward = scorer.collect()[0].rollouts[0].reward
        assert reward is not None and reward.acc == reward.score == 1.0, number
    assert "used 20 tokens" in str(scorer.over_budget())
    scorer.settings = dataclasses.replace(scorer.settings, max_tokens_spent=0)
    assert scorer.over_budget() is None  # without a limit
    scorer.close()
    scorer.close()  # nothing more to end


def test_a_row_without_a_correct_answer_is_not_asked_about() -> None:
    scorer = Answering(lambda text, sampling: "right", kind="reference")
    prompt = Prompt("row 7", ({"role": "user", "content": "q"},), (), "s", None)
    scorer.submit(Group(prompt, (Rollout((), (), (), (), "stop", text="x"),), 0, 0))
    (done,) = scorer.collect()[0].rollouts
    failures = scorer.observe()["judge/failures"].result()
    scorer.close()
    assert done.reward is None and done.failure is not None and "row 'row 7' has no correct answer" in done.failure
    assert scorer.asked == [] and failures == 1


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('name = "a"\ntext = "t"\nchoices = ["x", "x"]', "at least two different"),
        ('name = "a"\ntext = "t"\nchoices = ["x", "y", "x"]', "at least two different"),
        ('name = "a"\ntext = "t"\nchoices = "xy"', "at least two different"),
        ('name = ""\ntext = "t"\nchoices = ["x", "y"]', "has no name or text"),
        ('name = "a"\ntext = ""\nchoices = ["x", "y"]', "has no name or text"),
        ('name = "a"\ntext = "t"\nchoices = ["x", "y"]\nweight = true', "weight=True"),
        ('name = "a"\ntext = "t"\nchoices = ["x", "y"]\nweight = -1', "weight=-1"),
        ('name = "a"\ntext = "t"\nchoices = ["x", "y"]\nweight = inf', "weight=inf"),
        ('name = "a"\ntext = "t"\nchoices = ["x", "y"]\nweight = 1e308', "weight=1e\\+308"),
        ('name = "reason"\ntext = "t"\nchoices = ["x", "y"]', "name='reason', under which the judge gives its reason"),
        ('name = "a"\ntext = "t"\nchoices = ["x", "y"]\nmore = 1', "expected name, text, choices"),
        ('name = "first"\ntext = "t"\nchoices = ["x", "y"]', "two criteria of one name; names are first, first"),
    ],
)
def test_a_criterion_that_cannot_be_used_is_named_by_its_number(tmp_path: Path, lines: str, problem: str) -> None:
    file = tmp_path / "rubric.toml"
    file.write_text(
        f'[[criteria]]\nname = "first"\ntext = "t"\nchoices = [1, 2]\nweight = 0.5\n[[criteria]]\n{lines}\n'
    )
    with pytest.raises(RewardError, match=problem) as caught:
        read_rubric(str(file))
    assert "criterion 2" in str(caught.value) or "one name" in problem
    file.write_text('[[criteria]]\nname = "first"\ntext = "t"\nchoices = [1, 2]\n')
    assert read_rubric(str(file)) == (Criterion("first", "t", 1.0, ("1", "2")),)
