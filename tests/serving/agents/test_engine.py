"""Agents against a real engine: what is recorded, and that it is what the built-in environments record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from gspo.build.engines import stop_tokens
from gspo.data.chat_append import ChatAppender
from gspo.environments.loading import EnvironmentSpec
from gspo.models.load import load_model, load_tokenizer
from gspo.rollout.engine import GroupRequest, RolloutEngine, SamplingParams
from gspo.rollout.episodes.dialogue import DialogueSettings
from gspo.rollout.episodes.settings import EpisodeSettings
from gspo.rollout.native.engine import NativeEngine
from gspo.serving.agents.settings import AgentSettings
from gspo.types import Group, Prompt, Rollout

PROGRAMS = "tests.serving.agents.programs"
MAX_LENGTH = 160
NewEngine = Callable[..., RolloutEngine]


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model("embedded"), load_tokenizer("embedded")


@pytest.fixture
def wrap(loaded: Any) -> Iterator[NewEngine]:
    """A function of settings: an engine of agents or episodes over a new native engine."""
    model, tokenizer = loaded
    stops = stop_tokens(model.generation_config, tokenizer)
    with ExitStack() as stack:

        def wrap(settings: Any) -> RolloutEngine:
            native = NativeEngine(
                model, tokenizer.decode, eos_token_ids=stops, pad_token_id=0, num_slots=6, max_length=MAX_LENGTH
            )
            engine = settings.wrap(native, tokenizer, eos_token_ids=stops, max_length=MAX_LENGTH)
            stack.callback(engine.close)
            return engine

        yield wrap


def agent(name: str, **options: Any) -> AgentSettings:
    return AgentSettings(f"{PROGRAMS}:{name}", **options)


def environment(name: str) -> EpisodeSettings:
    return EpisodeSettings(EnvironmentSpec(name), DialogueSettings(), num_workers=1)


def requests(loaded: Any, n: int = 3, num: int = 3, temperature: float = 1.0) -> list[GroupRequest]:
    found = []
    for number in range(num):
        messages = ({"role": "user", "content": f"{number}+{2 * number}="},)
        tokens = ChatAppender(loaded[1]).opened(messages)
        prompt = Prompt(f"row/{number}", messages, tokens, "guess", str(3 * number))
        found.append(GroupRequest(prompt, number, n, 0, SamplingParams(60, temperature), seed=11))
    return found


def run(engine: RolloutEngine, asked: list[GroupRequest]) -> list[Group]:
    for request in asked:
        engine.submit(request)
    groups = []
    while engine.num_in_flight:
        groups += engine.step()
    return sorted(groups, key=lambda group: group.submission)


def record(rollout: Rollout) -> Any:
    """What training sees of a rollout. Log-probs differ by rounding: prompts are prefilled in other company."""
    turns = [(turn.start, turn.end, turn.reward) for turn in rollout.turns]
    log_probs = pytest.approx(rollout.log_probs, abs=1e-4)
    return rollout.token_ids, log_probs, rollout.loss_mask, rollout.versions, rollout.context, turns


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether records agree, with the numbers of `found` as numbers."""
    flat = [[(record, other) for record, other in zip(a, b, strict=True)] for a, b in zip(found, wanted, strict=True)]
    pairs = [pair for group in flat for pair in group]
    return all((a[0], a[1].expected, *a[2:]) == b for a, b in pairs)


def records(groups: list[Group]) -> list[Any]:
    return [[record(rollout) for rollout in group.rollouts] for group in groups]


def test_records_are_those_of_the_built_in_environment(wrap: NewEngine, loaded: Any) -> None:
    settings = environment("guess")
    pool = settings.open_pool()
    settings = settings.with_tools(pool)
    pool.close()
    wanted = records(run(wrap(settings), requests(loaded)))
    assert same(records(run(wrap(agent("guess")), requests(loaded))), wanted)
    assert max(len(turns) for group in wanted for *_, turns in group) > 2


def test_generate_gives_the_records_of_step_and_leaves_groups_in_flight(wrap: NewEngine, loaded: Any) -> None:
    wanted = records(run(wrap(agent("guess")), requests(loaded)))
    engine = wrap(agent("guess"))
    asked = requests(loaded)
    engine.submit(asked[1])
    groups = engine.step()
    assert same(records(engine.generate(asked)), wanted)
    while engine.num_in_flight:
        groups += engine.step()
    assert same(records(groups), wanted[1:2])


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lag_changes_no_token(wrap: NewEngine, loaded: Any, lag: int) -> None:
    asked = requests(loaded)
    assert same(records(run(wrap(agent("guess", lag=lag)), asked)), records(run(wrap(agent("guess")), asked)))


@pytest.mark.parametrize(("program", "asked"), [("two_conversations", "<user>check "), ("goes_back", "instead")])
def test_log_probs_are_those_of_the_conversations(wrap: NewEngine, loaded: Any, program: str, asked: str) -> None:
    """Every branch with its own context; all of a rollout's requests are in one of them."""
    model = loaded[0]
    (group,) = run(wrap(agent(program)), requests(loaded, n=2, num=1))
    for rollout in group.rollouts:
        assert len(rollout.turns) == 2 and rollout.turns[-1].reward == 0.5
        (branch,) = rollout.branches
        assert len(branch.turns) == 1 and asked in loaded[1].decode(branch.context)
        for part in (rollout, branch):
            context = part.context or group.prompt.token_ids
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *part.token_ids]])).logits[0, len(context) - 1 : -1]
            log_probs = logits.log_softmax(-1)
            for row, token, log_prob, own in zip(log_probs, part.token_ids, part.log_probs, part.loss_mask):
                assert log_prob == (pytest.approx(row[token].item(), abs=1e-4) if own else 0.0)
            assert sum(part.loss_mask) == sum(turn.end - turn.start for turn in part.turns)


def test_a_text_that_grows_is_one_conversation(wrap: NewEngine, loaded: Any) -> None:
    (group,) = run(wrap(agent("by_text")), requests(loaded, n=3, num=1))
    for rollout in group.rollouts:
        assert not rollout.branches and len(rollout.turns) == 3
        text = loaded[1].decode([*rollout.context, *rollout.token_ids], skip_special_tokens=True)
        for turn, following in zip(rollout.turns, rollout.turns[1:]):
            between = loaded[1].decode(rollout.token_ids[turn.end : following.start])
            assert between == "7;" if turn.text.endswith("=") else between.endswith("7;")
        assert text.startswith("0+0=")


@pytest.mark.parametrize(
    ("name", "says"),
    [("raises", "RuntimeError: a defect of the agent"), ("says_nothing", "no request"), ("sleeps", "within 0.2 s")],
)
def test_an_agent_that_fails_gives_no_reward(wrap: NewEngine, loaded: Any, name: str, says: str) -> None:
    engine = wrap(agent(name, timeout=0.2))
    (group,) = run(engine, requests(loaded, n=2, num=1))
    assert all(rollout.failure and says in rollout.failure for rollout in group.rollouts)
    assert engine.metrics()["environment/timeouts"].result() == (2 if name == "sleeps" else 0)


def test_a_resumed_agent_gets_the_answers_it_had(wrap: NewEngine, loaded: Any) -> None:
    wanted = records(run(wrap(agent("guess")), requests(loaded)))
    engine, groups = wrap(agent("guess")), []
    for request in requests(loaded):
        engine.submit(request)
    for _ in range(5):
        groups += engine.step()
    state = engine.unfinished()
    assert any(part.turns for request in state for part in request.partial)
    engine.clear()
    for request in state:  # weights that changed would change what is written anew, not what was recorded
        engine.submit(dataclasses.replace(request, version=1))
    while engine.num_in_flight:
        groups += engine.step()
    assert same(records(sorted(groups, key=lambda group: group.submission)), wanted)


def test_a_resumed_agent_is_told_again_which_answers_were_cut(wrap: NewEngine, loaded: Any) -> None:
    asked = requests(loaded, n=1, num=1)

    def rewards(group: Group) -> list[float | None]:
        parts = [part for rollout in group.rollouts for part in (rollout, *rollout.branches)]
        return sorted(turn.reward or 0.0 for part in parts for turn in part.turns)

    (wanted,) = run(wrap(agent("notes_ends")), asked)
    assert rewards(wanted) == [0.0, 1.0]
    engine = wrap(agent("notes_ends"))
    engine.submit(asked[0])
    while not any(part.turns for request in engine.unfinished() for part in request.partial):
        assert engine.step() == []
    (state,) = engine.unfinished()
    engine.clear()
    (group,) = run(engine, [state])
    assert rewards(group) == [0.0, 1.0] and same(records([group]), records([wanted]))


def test_the_policy_decides_how_tokens_are_drawn(wrap: NewEngine, loaded: Any) -> None:
    """Greedy, whatever the client says."""
    groups = run(wrap(agent("guess")), requests(loaded, n=2, num=1, temperature=0.0))
    first, second = groups[0].rollouts
    assert first.token_ids == second.token_ids


def test_records_of_tool_calls_are_those_of_the_built_in_calculator() -> None:
    """With the model that was taught to call it, and an agent that is a plain function."""
    model, tokenizer = load_model("embedded-turns"), load_tokenizer("embedded-turns")
    stops = stop_tokens(model.generation_config, tokenizer)
    asked = []
    for number, question in enumerate(("38*47+19=", "12*71+5=", "9*88+61=", "7*7+1=")):
        messages = ({"role": "user", "content": question},)
        prompt = Prompt(f"row/{number}", messages, ChatAppender(tokenizer).opened(messages), "calculator", "0")
        asked.append(GroupRequest(prompt, number, 4, 0, SamplingParams(64), seed=3))
    settings = environment("calculator")
    pool = settings.open_pool()
    settings = settings.with_tools(pool)
    pool.close()
    found = []
    for each in (settings, agent("calculate", tool_format="tag")):
        native = NativeEngine(
            model, tokenizer.decode, eos_token_ids=stops, pad_token_id=0, num_slots=16, max_length=MAX_LENGTH
        )
        engine = each.wrap(native, tokenizer, eos_token_ids=stops, max_length=MAX_LENGTH)
        found.append(run(engine, asked))
        engine.close()
    assert same(records(found[1]), records(found[0]))
    calls = [[sum(t.num_calls for t in r.turns) for g in groups for r in g.rollouts] for groups in found]
    assert calls[0] == calls[1] and sum(calls[0]) > 0
