"""How an episode ends, answer by answer, and what is recorded of every turn on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gspo.environments.protocol import Action, Step
from gspo.rollout.episodes.engine import Episodes
from gspo.seeding import derive_seed
from gspo.types import Group, Prompt, Rollout, Turn
from tests.rollout.episodes.world import ENDS, LocalPool, make_episodes, make_tokenizer, recite
from tests.rollout.models import drain, make_request

TOKENIZER = make_tokenizer()


def say(content: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": content},)


class Scripted:
    """Answers turn by turn with `steps`; an exception among them is raised."""

    tools = ()

    def __init__(self, *steps: Any, opening: Any = ()) -> None:
        self._steps, self._opening = steps, opening

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self.prompt, self.seed, self.actions = prompt, seed, []
        return self._opening(self) if callable(self._opening) else self._opening

    def step(self, action: Action) -> Any:
        self.actions.append(action)
        step = self._steps[action.turn]
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None: ...


def play(
    texts: list[str], *steps: Any, n: int = 1, max_tokens: int = 60, first: int = 0, **settings: Any
) -> tuple[Group, LocalPool]:
    pool = LocalPool(lambda: Scripted(*steps))
    engine = make_episodes(recite(texts), pool, **settings)
    engine.submit(dataclasses.replace(make_request(3, n=n, max_tokens=max_tokens), first_response=first))
    (group,) = drain(engine, limit=50)
    assert sorted(set(pool.ended)) == sorted({job.key for job in pool.jobs}), "every episode is closed"
    return group, pool


CALL = "<tool>1</tool>"
MORE = Step(say("go on"))


@pytest.mark.parametrize(
    ("texts", "steps", "settings", "reason", "num_turns"),
    [
        # The environment ends it; with tools, a turn without a call that it accepts is an answer.
        (["a"], [Step(done=True)], {}, "environment", 1),
        (["a"], [Step(truncated=True)], {}, "environment", 1),
        (["a", "b"], [MORE, Step(done=True)], {}, "environment", 2),
        (["a"], [Step(done=True)], {"tool_format": "tag"}, "stop", 1),
        (["a"], [Step(done=True, truncated=True)], {"tool_format": "tag"}, "environment", 1),
        ([CALL], [Step(done=True)], {"tool_format": "tag"}, "environment", 1),
        # A turn that the length limit cut: the environment may still end the episode.
        (["abcd"], [MORE], {"max_tokens": 5}, "length", 1),
        (["abcd"], [Step(done=True)], {"max_tokens": 5}, "environment", 1),
        (["abcd"], [MORE], {"max_tokens": 5, "max_turns": 1}, "length", 1),
        # Limits of turns and of observations.
        (["a", "b"], [MORE, MORE], {"max_turns": 2}, "turns", 2),
        (["a", "b", "c"], [MORE, MORE, Step(done=True)], {"max_turns": 3}, "environment", 3),
        (["a", "b", "c"], [MORE, MORE, MORE], {"max_observations": 2}, "turns", 3),
        (["a", "b"], [MORE, MORE], {"max_observations": 1, "max_turns": 9}, "turns", 2),
        (["a", "b"], [MORE, MORE], {"max_observations": 9, "max_turns": 2}, "turns", 2),
        # "a", its end and the seven tokens of the observation: nine must leave a token to write.
        (["a", "b"], [MORE, Step(done=True)], {"max_tokens": 9}, "length", 1),
        (["a", ""], [MORE, MORE], {"max_tokens": 10}, "length", 2),
    ],
)
def test_the_reason_of_an_end(texts, steps, settings, reason, num_turns) -> None:
    group, pool = play(texts, *steps, **settings)
    (rollout,) = group.rollouts
    assert (rollout.finish_reason, len(rollout.turns), rollout.failure) == (reason, num_turns, None)
    *earlier, last = pool.jobs[-1].actions
    assert not any(action.is_last for action in earlier) and (last.is_last or reason != "turns")
    assert rollout.text == texts[num_turns - 1]
    assert rollout.turns[-1].end == len(rollout.token_ids)


@pytest.mark.parametrize(
    ("steps", "failure"),
    [
        ([Step()], "step returned neither messages nor done=True"),
        ([MORE, RuntimeError("the board is gone")], "the board is gone"),
        ([Step(say("x"), reward=float("nan"))], "the reward of a step is nan"),
    ],
)
def test_an_environment_that_fails_is_named_with_the_response_in_its_whole_group(steps, failure) -> None:
    group, _ = play(["a", "b"], *steps, n=2, first=4)
    for number, rollout in enumerate(group.rollouts, 4):
        assert rollout.failure is not None and failure in rollout.failure
        assert rollout.failure.startswith(f"the environment failed on row 'p3', response {number}: ")
        assert (rollout.finish_reason, len(rollout.turns)) == ("environment", len(steps))


def test_every_turn_is_recorded_with_its_answer_and_the_tokens_between_are_not_the_models() -> None:
    steps = [
        Step((*say("one"), *say("two")), 0.5, metrics={"size": 2}, num_errors=1),
        Step(say("x" * 30), None, metrics={"size": 3}),
        Step(say("bye"), 0.25, done=True),
    ]
    group, pool = play(["ab", "c", "d"], *steps, max_observation=4, truncate_side="left")
    (rollout,) = group.rollouts
    assert TOKENIZER.decode(rollout.token_ids) == "ab<eos>\none\ntwo\nc<eos>\nxxxx...(truncated)...\nd<eos>"
    first, second, third = rollout.turns
    assert first == Turn(0, 3, "ab", 0.5, num_errors=1, observation="one\ntwo", metrics={"size": 2.0})
    assert second == Turn(12, 14, "c", None, observation="x" * 30, num_cut=1, metrics={"size": 3.0})
    assert (third.text, third.reward, third.observation, third.num_cut) == ("d", 0.25, "bye", 0)
    own = {i for turn in rollout.turns for i in range(turn.start, turn.end)}
    assert rollout.loss_mask == tuple(int(i in own) for i in range(len(rollout.token_ids)))
    assert rollout.log_probs == tuple(-float(i in own) for i in range(len(rollout.token_ids)))
    assert set(rollout.versions) == {0} and len(rollout.versions) == len(rollout.token_ids)
    assert [(len(job.actions), job.num_known) for job in pool.jobs] == [(1, 0), (2, 1), (3, 2)]
    assert [(str(a), a.turn, a.was_cut) for a in pool.jobs[-1].actions] == [
        ("ab", 0, False),
        ("c", 1, False),
        ("d", 2, False),
    ]


def test_calls_and_what_is_malformed_are_counted_by_turn() -> None:
    bad, good = "<tool_call>no</tool_call>", '<tool_call>{"name": "f"}</tool_call>'
    group, _ = play(
        [good + bad, good, "a"], MORE, MORE, Step(done=True), tool_format="hermes", max_calls=2, max_tokens=120
    )
    assert [(t.num_calls, t.malformed) for t in group.rollouts[0].turns] == [(2, True), (1, False), (0, False)]


def test_siblings_are_played_with_one_seed_and_question_and_keys_of_their_own() -> None:
    group, pool = play(["a"], Step(done=True), n=2, first=1)
    assert [job.key for job in pool.jobs] == [(5, 3, 1), (5, 3, 2)]
    assert {job.seed for job in pool.jobs} == {derive_seed(5, "environment", 3)}
    assert all(job.prompt is not None and job.prompt.token_ids == () for job in pool.jobs)
    assert group.prompt.token_ids == make_request(3).prompt.token_ids


def opened(opening: Any, n: int = 2, **settings: Any) -> tuple[Group, Episodes]:
    pool = LocalPool(lambda: Scripted(Step(done=True), opening=opening))
    engine = make_episodes(recite(["a"]), pool, opens=True, **settings)
    engine.submit(make_request(3, n=n, max_tokens=20))
    (group,) = drain(engine, limit=50)
    return group, engine


def test_an_opening_that_is_too_long_or_differs_between_siblings_is_a_failure() -> None:
    group, _ = opened(say("x" * 109))
    failures = [r.failure or "" for r in group.rollouts]
    assert all("reset: prompt 'p3': " in failure and "max_length=128" in failure for failure in failures)
    group, _ = opened(say("x" * 108))
    assert [r.failure for r in group.rollouts] == [None, None] and len(group.prompt.token_ids) == 108
    count = iter(range(9))
    group, _ = opened(lambda env: say(str(next(count))))
    assert group.rollouts[0].failure is None
    assert "another beginning" in (group.rollouts[1].failure or "")


def part(tokens: str, *turns: Turn, own: int) -> Rollout:
    """A response begun elsewhere: its text, of which the tokens of turns are the model's."""
    ids = tuple(TOKENIZER(tokens)["input_ids"])
    mask = tuple(int(any(t.start <= i < t.end for t in turns) or i >= own) for i in range(len(ids)))
    return Rollout(ids, tuple(-1.0 * m for m in mask), mask, (0,) * len(ids), "aborted", turns=turns)


@pytest.mark.parametrize(
    ("observation", "reward", "diverges"),
    [("ok", 0.5, False), ("no", 0.5, True), ("ok", 0.75, True), ("okk", 0.5, True)],
)
def test_a_resumed_episode_goes_on_only_where_its_environment_repeats_itself(observation, reward, diverges) -> None:
    """Its first turn was answered with `ok` and 0.5; its second has ended and waits for its answer."""
    first = Turn(0, 2, "a", 0.5, observation="ok")
    begun = part("a<eos>\nok\nb<eos>".replace("<eos>", TOKENIZER.decode([ENDS[1]])), first, own=6)
    begun = dataclasses.replace(begun, turns=(first, Turn(6, 8, "b")))
    pool = LocalPool(lambda: Scripted(Step(say(observation), reward), Step(done=True)))
    engine = make_episodes(recite(["new", "end"]), pool)
    engine.submit(dataclasses.replace(make_request(3, n=1, max_tokens=40), partial=(begun,)))
    (group,) = drain(engine, limit=50)
    assert engine.counts.diverged == diverges
    assert [t.text for t in group.rollouts[0].turns] == (["new", "end"] if diverges else ["a", "b"])
    assert engine.metrics()["environment/diverged"].value == diverges


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_an_answer_is_read_its_lag_of_steps_after_its_turn(lag) -> None:
    pool = LocalPool(lambda: Scripted(MORE, Step(done=True)))
    engine = make_episodes(recite(["a", "b"]), pool, lag=lag)
    engine.submit(make_request(3, n=1, max_tokens=40))
    num_steps = 0
    while engine.num_in_flight:
        num_steps += 1
        done = engine.step()
    assert len(done) == 1 and num_steps == 2 + 2 * lag
    # Two steps write; the others wait, of which the first of each answer is counted as writing.
    share = engine.metrics()["rollout/waiting_share"].value
    assert share == pytest.approx(2 * lag / (2 + 2 * lag))


def test_new_weights_put_an_answer_off_as_a_resume_does() -> None:
    pool = LocalPool(lambda: Scripted(Step(done=True)))
    engine = make_episodes(recite(["a"]), pool, lag=2)
    engine.submit(make_request(3, n=1, max_tokens=40))
    assert engine.step() == [] and engine.step() == []
    engine.load_weights(None, 1)
    assert engine.step() == [] and len(engine.step()) == 1


@pytest.mark.parametrize("opens_with", ["go", "other"])
def test_a_group_whose_opening_changed_is_opened_anew(opens_with) -> None:
    asked = ({"role": "user", "content": "hi"},)
    ids = lambda text: tuple(TOKENIZER(text)["input_ids"])  # noqa: E731
    prompt = Prompt("p", (*asked, *say("go")), ids("hi\ngo"), opening=say("go"))
    begun = dataclasses.replace(part("a.", own=0), turns=(Turn(0, 2, "a"),))
    pool = LocalPool(lambda: Scripted(Step(done=True), opening=say(opens_with)))
    engine = make_episodes(recite(["new"]), pool, opens=True)
    request = dataclasses.replace(make_request(3, n=2, max_tokens=40), prompt=prompt, partial=(begun,))
    engine.submit(request)
    (group,) = drain(engine, limit=50)
    assert group.prompt == Prompt("p", (*asked, *say(opens_with)), ids(f"hi\n{opens_with}"), opening=say(opens_with))
    assert [r.text for r in group.rollouts] == (["a", "new"] if opens_with == "go" else ["new", "new"])
    assert all(job.prompt is not None and job.prompt.messages == asked and not job.prompt.opening for job in pool.jobs)
