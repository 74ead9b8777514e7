"""The scorer of functions: where rows are graded, how groups become jobs, and what a broken answer of a worker is."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.rewards import builtin, scoring
from gspo.rewards.compose import Finishing, Overlong, RewardScale
from gspo.rewards.functions import RewardSpec, wrap_function
from gspo.rewards.pool.frames import Channel, pack, receive, send
from gspo.rewards.pool.growth import WorkerLimit
from gspo.rewards.pool.worker_pool import JobFailed
from gspo.rewards.protocol import RewardError
from gspo.rewards.scoring import PoolScorer, dry_run, make_scorer, responses_of
from gspo.types import Group, Prompt, Reward, Rollout, Turn


def length(prompt: Prompt, response: str) -> float:
    return float(len(response))


def group(*texts: str, source: str = "exact", truth: Any = "a") -> Group:
    rollouts = tuple(Rollout((), (), (), (), "stop", text=text) for text in texts)
    return Group(Prompt("row", (), (), source, truth), rollouts, 0, 0)


def found(groups: list[Group]) -> list[float | str | None]:
    return [r.failure if r.reward is None else r.reward.score for g in groups for r in g.rollouts]


def test_responses_have_the_models_tokens_their_place_and_their_turns() -> None:
    turns = (Turn(0, 1, "one"),)
    rollout = Rollout((5, 6, 7), (0.0,) * 3, (1, 0, 1), (0,) * 3, "length", "text", turns=turns)
    first, second = responses_of(Group(Prompt("p", (), ()), (rollout, rollout), 0, 0))
    assert (first, first.token_ids, first.index, first.finish_reason, first.turns) == (
        "text",
        (5, 7),
        0,
        "length",
        turns,
    )
    assert second.index == 1


class Jobs:
    """A pool that keeps its jobs and answers from a list."""

    def __init__(self, *answers: Any, whole_group: bool = False, names: tuple[str, ...] = ("f",)) -> None:
        self.answers, self.jobs = list(answers), []
        self.source = SimpleNamespace(info={"whole_group": whole_group, "names": list(names)})

    def submit(self, payload: Any) -> Future[Any]:
        self.jobs.append([str(response) for response in payload[1]])
        future: Future[Any] = Future()
        answer = self.answers.pop(0)
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future

    def close(self) -> None:
        pass


def scored(jobs: Jobs, *groups_: Group, finishing: Finishing | None = None) -> list[float | str | None]:
    scorer = PoolScorer([RewardSpec("code")], finishing=finishing or Finishing())
    scorer.pool = jobs  # type: ignore[assignment]
    for one in groups_:
        scorer.submit(one)
    return found(scorer.collect())


def test_each_response_is_a_job_unless_the_group_is_one() -> None:
    one, two = {"score": 1.0}, {"score": 2.0}
    single = Jobs([one], [two], [two])
    assert scored(single, group("a", "b"), group("c")) == [1.0, 2.0, 2.0]
    assert single.jobs == [["a"], ["b"], ["c"]]
    whole = Jobs([one, two], [two], whole_group=True)
    assert scored(whole, group("a", "b"), group("c")) == [1.0, 2.0, 2.0]
    assert whole.jobs == [["a", "b"], ["c"]]
    assert scored(Jobs(whole_group=True), group()) == [] == scored(Jobs(), group())


def test_a_job_that_fails_or_answers_otherwise_fails_its_own_responses() -> None:
    one = {"score": 1.0}
    jobs = Jobs([one], JobFailed("it hung"), [one, one], "nonsense", [{"failure": "no"}])
    head = "reward function f failed on row 'row', response"
    wrong = "its worker did not answer with a list of results"
    assert scored(jobs, group(*"abcde")) == [
        1.0,
        f"{head} 1: it hung",
        f"{head} 2: {wrong}",
        f"{head} 3: {wrong}",
        "no",
    ]
    whole = Jobs(JobFailed("it hung"), whole_group=True, names=())
    head = "reward function for data_source 'exact' failed on row 'row', response"
    assert scored(whole, group("a", "b")) == [f"{head} 0: it hung", f"{head} 1: it hung"]
    several = Jobs(JobFailed("x"), names=("f", "g"))
    assert str(scored(several, group("a"))[0]).startswith("reward function f, g failed")
    short = Jobs([one], whole_group=True)
    assert [str(item).endswith(wrong) for item in scored(short, group("a", "b"))] == [True, True]


def test_the_manager_and_the_scale_finish_what_workers_answer() -> None:
    finishing = Finishing("dapo", Overlong(4, 2), RewardScale(scale=2.0))
    rollout = Rollout((1,) * 3, (0.0,) * 3, (1,) * 3, (0,) * 3, "stop", text="a")
    assert scored(Jobs([{"score": 1.0}]), Group(Prompt("r", (), ()), (rollout,), 0, 0), finishing=finishing) == [1.0]


def test_groups_are_collected_in_order_and_forgotten_when_closed() -> None:
    scorer = make_scorer("exact")
    for text in ("a", "b", "a"):
        scorer.submit(group(text))
    assert found(scorer.collect(2)) == [1.0, 0.0] and found(scorer.collect(0)) == []
    scorer.submit(group("b"))
    assert found(scorer.collect()) == [1.0, 0.0] and scorer.collect() == []
    scorer.submit(group("a"))
    scorer.close()
    assert scorer.collect() == []


@pytest.mark.parametrize(
    ("specs", "source", "here"),
    [
        ([RewardSpec("exact")], "anything", True),
        ([RewardSpec("default")], "arithmetic", True),
        ([RewardSpec("default")], "code", False),
        ([RewardSpec("default")], "no such source", True),
        ([RewardSpec("math")], "exact", False),
        ([RewardSpec("exact"), RewardSpec("math")], "exact", False),
        ([RewardSpec("exact"), RewardSpec("format")], "exact", True),
        ([RewardSpec("f", "file.py")], "exact", False),
        ([wrap_function(length)], "exact", False),
    ],
)
def test_where_rows_are_graded(specs: Any, source: str, here: bool) -> None:
    assert PoolScorer(specs).grades_here(source) is here


def test_what_is_imported_before_workers_start() -> None:
    own = builtin.registering_modules()
    assert scoring._preloads([RewardSpec("math"), RewardSpec("exact")], "") == [*own, "math_verify"]
    assert scoring._preloads([RewardSpec("default")], "aime2024") == [*own, "math_verify"]
    assert scoring._preloads([RewardSpec("default")], "") == own
    both = scoring._preloads([RewardSpec("default"), RewardSpec("reasoning_gym")], "math500")
    assert both == [*own, "math_verify", "reasoning_gym"]
    assert scoring._preloads([wrap_function(length), RewardSpec("math", "file.py")], "math500") == own


def test_a_scorer_gets_its_rewards_settings_and_shaping(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[Any], dict[str, Any]]] = []

    class Kept:
        def __init__(self, specs: list[Any], **options: Any) -> None:
            made.append((specs, options))

        def start(self) -> None:
            made[-1][1]["started"] = True

    monkeypatch.setattr(scoring, "PoolScorer", Kept)
    overlong, scale = Overlong(4, 2), RewardScale(2.0)
    make_scorer(
        ["exact", {"name": "code", "kwargs": {"level": 1}}, "default"],
        manager="dapo",
        num_workers=3,
        timeout=8.0,
        memory=9,
        retries=5,
        overlong=overlong,
        scale=scale,
        format_weight=0.5,
        repetition_penalty=-0.25,
        sandbox_level=2,
        allow_unsandboxed_code=True,
    )
    (specs, options) = made.pop()
    code = {"timeout": 4.0, "level": 2, "allow_unsandboxed": True}
    assert [(spec.name, spec.weight, dict(spec.kwargs)) for spec in specs] == [
        ("exact", 1.0, {}),
        ("code", 1.0, {**code, "level": 1}),
        ("default", 1.0, {"code": code}),
        ("format", 0.5, {}),
        ("repetition", -0.25, {}),
    ]
    finishing = Finishing("dapo", overlong, scale)
    assert options == {"finishing": finishing, "num_workers": 3, "timeout": 8.0, "memory": 9, "retries": 5}
    make_scorer(RewardSpec("code", "own.py"))
    assert made[0][0] == [RewardSpec("code", "own.py")] and made[0][1]["started"]
    make_scorer({"name": "default", "kwargs": {"code": {"timeout": 1.0}, "math": {"x": 1}}})
    kwargs = made[1][0][0].kwargs
    assert kwargs["math"] == {"x": 1} and kwargs["code"]["timeout"] == 1.0 and kwargs["code"]["level"] is None
    assert len(made[1][0]) == 1


def test_managers_that_cannot_be_are_refused() -> None:
    with pytest.raises(RewardError, match=r"reward_manager='mine', expected one of naive, dapo, batch, prime"):
        make_scorer("exact", manager="mine")  # type: ignore[arg-type]
    for manager in ("naive", "batch", "prime"):
        with pytest.raises(RewardError, match=f"needs reward_model.reward_manager=dapo; {manager} does not"):
            make_scorer("exact", manager=manager, overlong=Overlong(4, 2))


def test_a_reward_is_tried_on_the_rows_own_truth_or_on_a_text() -> None:
    scorer = make_scorer("exact")
    prompt = Prompt("row", (), (), "exact", 7)
    assert dry_run(scorer, prompt) == Reward(1.0, 1.0) and dry_run(scorer, prompt, "8") == Reward(0.0, 0.0)
    assert dry_run(scorer, prompt, "").score == 0.0 and scorer.collect() == []
    with pytest.raises(RewardError, match=r"tried on one row before the start: .*no such source"):
        dry_run(make_scorer(None), Prompt("row", (), (), "no such source", 7))


def test_threads_grade_functions_of_this_process_with_one_worker_unless_more_are_asked_for() -> None:
    assert PoolScorer([wrap_function(length)])._num_workers == 1
    assert PoolScorer([wrap_function(length)], num_workers=3)._num_workers == 3
    assert PoolScorer([RewardSpec("code")])._num_workers == scoring.num_cores() >= 1
    scorer = make_scorer(length)
    scorer.submit(group("a", "bbb"))
    assert found(scorer.collect()) == [1.0, 3.0]
    scorer.close()


def test_messages_arrive_whole_whatever_the_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        assert channel.read() is None
        data = pack(b"one") + pack(b"") + pack(b"three")
        for byte in data[:6]:
            theirs.sendall(bytes([byte]))
            assert channel.read() is None and channel.has_more
        theirs.sendall(data[6:])
        assert channel.read() == b"one" and channel.has_more
        theirs.sendall(pack(b"four"))
        assert channel.read() == b""
        channel.outgoing = pack(b"x" * 10) + pack(b"y")
        channel.write()
        assert channel.outgoing == b"" and receive(theirs) == b"x" * 10 and receive(theirs) == b"y"
        theirs.close()
        with pytest.raises(EOFError):
            channel.read(), channel.read()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs, b"whole")
        assert receive(ours) == b"whole"
        theirs.sendall(pack(b"cut off")[:-1])
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours)


def test_a_pool_grows_only_while_every_worker_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gspo.rewards.pool.growth.time.monotonic", lambda: now[0])
    limit = WorkerLimit(3, 20, timeout=80.0)
    assert (limit.now, limit.size, limit.most) == (3, 3, 20) and WorkerLimit(3, 2, 80.0).most == 3
    assert limit.next_growth([2.0, 5.0, 1.0]) == 15.0
    now[0] = 14.9
    assert not limit.grow_if_stuck([2.0, 5.0]) and limit.now == 3
    now[0] = 15.0
    assert limit.grow_if_stuck([2.0, 5.0]) and limit.now == 12
    assert limit.grow_if_stuck([2.0, 5.0]) and limit.now == 20
    limit.note_done()
    assert limit.next_growth([2.0]) == 25.0 and not limit.grow_if_stuck([2.0])
    limit.shrink()
    assert limit.now == 3
