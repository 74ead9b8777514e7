"""One rollout of an agent, request by request: which conversation it continues, what the engine gets, what is recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gspo.environments.formats import HERMES, TAG, ToolFormat
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.serving.agents.play import AgentGroup
from gspo.serving.agents.session import FIRST_PLACE, Session
from gspo.serving.errors import ApiError
from gspo.serving.jobs import Job
from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted, PromptReader
from gspo.serving.replies import Update
from gspo.types import Prompt, Rollout, Turn
from tests.rollout.episodes.world import make_tokenizer
from tests.rollout.models import EOS, VOCAB

TOKENIZER = make_tokenizer()
HI = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}]


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"]) if text else ()


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def group_request(**values: Any) -> GroupRequest:
    params = SamplingParams(max_tokens=40, temperature=0.7, stop_token_ids=(9,))
    return GroupRequest(Prompt("p", (HI,), ids("hi")), 3, 2, 1, params, 5, **values)


class Agent:
    """A session and what it posts; `answer` writes what an engine would."""

    def __init__(
        self, request: GroupRequest | None = None, index: int = 1, fmt: ToolFormat = HERMES, max_length: int = 64
    ) -> None:
        self.posted: list[Job] = []
        self.got: list[Any] = []
        reader = PromptReader(TOKENIZER, VOCAB, fmt, {})
        self.session = Session(
            request or group_request(), index, reader, max_length, lambda session, job: self.posted.append(job)
        )

    def ask(self, prompted: Prompted, max_tokens: int = 6, name: str = "", **ask: Any) -> Job:
        params = SamplingParams(max_tokens, ask.pop("temperature", 1.0), stop_token_ids=ask.pop("stop_tokens", ()))
        return self.session.open(prompted, Ask(params, **ask), self.got.append, name)

    def chat(self, *messages: dict[str, Any], tools: Any = (), **ask: Any) -> Job:
        return self.ask(self.session.chat(list(messages), list(tools)), **ask)

    def answer(self, job: Job, text: str, reason: Any = "stop", version: int = 2, stop: str | None = None) -> None:
        tokens = (*ids(text + (stop or "")), EOS)
        new = (tokens, (-1.0,) * len(tokens), (version,) * len(tokens))
        job.send([Update(0, text, *new, reason=reason, stop_text=stop)])
        self.session.answered()

    def play(self, *turns: tuple[list[dict[str, Any]], str], **ask: Any) -> None:
        for number, (messages, text) in enumerate(turns):
            self.answer(self.chat(*messages, name=f"id{number}", **ask), text)


def the_request(job: Job) -> GroupRequest:
    (request,) = job.requests
    return request


def test_the_first_request_on_the_rows_prompt_is_the_rollout_without_an_agent() -> None:
    agent = Agent(group_request(first_response=4))
    request = the_request(agent.chat(HI, temperature=0.1, stop_tokens=(8,)))
    assert agent.session.number == (3, 5)
    assert (request.prompt.uid, request.prompt.token_ids, request.prompt.messages) == ("p#5", ids("hi"), (HI,))
    assert (request.submission, request.first_response, request.n, request.version) == (3, 5, 1, 1)
    assert (request.seed, request.draw, request.partial) == (5, None, ())
    assert request.params == SamplingParams(6, 0.7, stop_token_ids=(9, 8))
    assert (request.hold, request.watch) == (True, False)
    assert agent.session.num_open == 1 and not agent.session.is_thinking and len(agent.posted) == 1


def test_stop_texts_and_inline_calls_are_watched() -> None:
    assert the_request(Agent().chat(HI, stop=("x",))).watch
    assert the_request(Agent().chat(HI, call_end=TAG.call_end)).watch


def test_a_chat_that_goes_on_is_one_conversation_with_its_tokens_as_they_were_written() -> None:
    agent = Agent()
    agent.answer(agent.chat(HI, name="one"), "yo")
    assert agent.session.is_thinking
    job = agent.chat(HI, said("yo"), user("so?"), name="two")
    request = the_request(job)
    (begun,) = request.partial
    assert request.prompt.token_ids == ids("hi") and request.submission == 3 and request.draw is None
    assert begun.token_ids == (*ids("yo"), EOS, *ids("\nso?\n"))
    assert begun.loss_mask == (1, 1, 1, 0, 0, 0, 0, 0) and begun.log_probs == (-1.0,) * 3 + (0.0,) * 5
    assert begun.versions == (2,) * 8 and (begun.turns, begun.text, begun.finish_reason) == ((), "", "aborted")
    assert request.params.max_tokens == 8 + 6
    agent.answer(job, "ok", reason="length", version=4)
    (conversation,) = agent.session.conversations
    assert conversation.turns == [Turn(0, 3, "yo"), Turn(8, 11, "ok", truncated=True)]
    assert (conversation.names, conversation.reason) == (["one", "two"], "length")
    assert conversation.versions == [2] * 8 + [4] * 3


def test_a_request_that_goes_back_opens_a_branch_with_draws_of_its_own() -> None:
    agent, again = Agent(), Agent()
    for each in (agent, again):
        each.play(([HI], "yo"), ([HI, said("yo"), user("a")], "b"))
    branch, second = (the_request(agent.chat(HI, said("yo"), user("c"))) for _ in range(2))
    before = (*ids("hi"), *ids("yo"), EOS, *ids("\nc\n"))
    for request in (branch, second):
        assert request.prompt.token_ids == before and request.partial == ()
        assert request.submission >= FIRST_PLACE and (request.first_response, request.draw) == (1, 3)
    assert branch.seed != second.seed != 5 and branch.submission != second.submission
    assert the_request(again.chat(HI, said("yo"), user("c"))).seed == branch.seed, "the same in every run"
    assert the_request(Agent(index=0).chat(user("c"))).seed != the_request(Agent().chat(user("c"))).seed
    assert len(agent.session.conversations) == 3


def test_the_same_first_prompt_again_is_a_branch_too() -> None:
    agent = Agent()
    first, second = (the_request(agent.chat(HI)) for _ in range(2))
    assert (first.submission, second.submission >= FIRST_PLACE) == (3, True)
    assert first.prompt.token_ids == second.prompt.token_ids and first.seed != second.seed


def test_a_conversation_that_is_being_answered_is_not_continued() -> None:
    agent = Agent()
    agent.play(([HI], "yo"))
    agent.chat(HI, said("yo"), user("a"))
    request = the_request(agent.chat(HI, said("yo"), user("a")))
    assert request.submission >= FIRST_PLACE and request.prompt.token_ids == (
        *ids("hi"),
        *ids("yo"),
        EOS,
        *ids("\na\n"),
    )


@pytest.mark.parametrize(
    ("messages", "tools", "continues"),
    [
        ([HI, said("yo"), user("a")], [], True),
        ([HI, {**said("yo"), "name": "me"}, user("a")], [], True),
        ([HI, said("yo")], [], False),
        ([HI, said("yoo"), user("a")], [], False),
        ([user("ho"), said("yo"), user("a")], [], False),
        ([HI, said("yo"), user("a")], TOOLS, False),
    ],
)
def test_a_chat_continues_what_it_begins_with(messages, tools, continues) -> None:
    agent = Agent()
    agent.play(([HI], "yo"))
    agent.chat(*messages, tools=tools)
    assert (len(agent.session.conversations) == 1) is continues


def test_calls_are_recorded_and_compared_without_their_ids() -> None:
    request = group_request()
    params = dataclasses.replace(request.params, max_tokens=90)
    agent = Agent(dataclasses.replace(request, params=params), max_length=128)
    text = 'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    agent.answer(agent.chat(HI, tools=TOOLS, name="one"), text)
    call = {"id": "other", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"role": "tool", "content": "2", "tool_call_id": "other"}
    agent.chat(HI, {"role": "assistant", "content": "so", "tool_calls": [call]}, tool, tools=TOOLS)
    (conversation,) = agent.session.conversations
    assert [(turn.text, turn.num_calls) for turn in conversation.turns] == [(text, 1)]


def test_answers_of_inline_tools_follow_their_call_directly() -> None:
    agent = Agent(fmt=TAG)
    agent.answer(agent.chat(HI, tools=TOOLS), "<tool>1</tool>")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
    tool = {"role": "tool", "content": "2"}
    job = agent.chat(HI, {"role": "assistant", "content": "", "tool_calls": [call]}, tool, tools=TOOLS)
    assert TOKENIZER.decode(the_request(job).partial[0].token_ids) == "<tool>1</tool><eos><result>2</result>"


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "ask", "limit"), [(40, 64, 6, 14), (12, 64, 6, 12), (40, 13, 6, 11), (40, 64, 1, 9)]
)
def test_the_limit_is_the_least_of_the_clients_the_rollouts_and_the_engines(max_tokens, max_length, ask, limit) -> None:
    request = group_request()
    request = dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=max_tokens))
    agent = Agent(request, max_length=max_length)
    agent.play(([HI], "yo"))
    assert the_request(agent.chat(HI, said("yo"), user("so?"), max_tokens=ask)).params.max_tokens == limit


@pytest.mark.parametrize(("max_tokens", "refused"), [(8, True), (9, False)])
def test_a_conversation_without_room_for_a_token_is_refused_and_ends_by_length(max_tokens, refused) -> None:
    request = group_request()
    request = dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=max_tokens))
    agent = Agent(request)
    agent.play(([HI], "yo"))
    if not refused:
        agent.chat(HI, said("yo"), user("so?"))
        return
    with pytest.raises(ApiError) as caught:
        agent.chat(HI, said("yo"), user("so?"))
    assert caught.value.code == "context_length_exceeded"
    (conversation,) = agent.session.conversations
    assert conversation.reason == "length" and len(conversation.token_ids) == 3 and agent.session.num_open == 0


def test_what_cannot_be_recorded_is_refused() -> None:
    agent = Agent()
    with pytest.raises(ApiError, match="n=2: one answer per request"):
        agent.chat(HI, n=2)
    with pytest.raises(ApiError, match="one prompt per request"):
        agent.session.completions(["hi", "ho"])
    agent.session.finish("stopped")
    with pytest.raises(ApiError, match="this rollout is over") as caught:
        agent.chat(HI)
    assert caught.value.status == 410 and agent.session.failure == "stopped" and not agent.session.conversations


def test_after_an_error_of_the_engine_the_next_request_continues_where_the_failed_one_did() -> None:
    agent = Agent()
    agent.play(([HI], "yo"))
    job, error = agent.chat(HI, said("yo"), user("first")), ApiError(500, "broken")
    job.send([Update(0, "x", ids("x"), (-1.0,), (2,))])
    job.send(error)
    agent.session.answered()
    assert agent.got[-1] is error
    request = the_request(agent.chat(HI, said("yo"), user("so")))
    (begun,) = request.partial
    assert request.submission == 3 and TOKENIZER.decode(begun.token_ids) == "yo<eos>\nso\n"
    assert begun.loss_mask == (1, 1, 1, 0, 0, 0, 0) and len(begun.log_probs) == len(begun.versions) == 7


def test_messages_that_the_template_refuses_are_an_error_of_the_request_in_every_turn() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}\n{% endfor %}"
    session = Session(group_request(), 0, PromptReader(tokenizer, VOCAB, HERMES, {}), 64, lambda session, job: None)
    late = {"role": "system", "content": "a"}
    for messages in ([late], [HI, said("yo"), late]):
        with pytest.raises(ApiError, match="the model's chat template refuses them: no") as caught:
            session.chat(messages, [])
        assert caught.value.status == 400
        job = session.open(session.chat([HI], []), Ask(SamplingParams(6, 1.0)), lambda found: None)
        job.send([Update(0, "yo", (*ids("yo"), EOS), (-1.0,) * 3, (2,) * 3, reason="stop")])


def test_a_text_that_grows_is_continued_behind_its_longest_beginning() -> None:
    agent = Agent()
    (opened,) = agent.session.completions("hi")
    agent.answer(agent.ask(opened, stop=("!",)), "yo", stop="!")
    (grown,) = agent.session.completions("hiyo! so")
    assert grown.token_ids == (*ids("hi"), *ids("yo!"), EOS, *ids(" so"))
    agent.answer(agent.ask(grown), "a")
    (longer,) = agent.session.completions("hiyo! soab")
    assert longer.token_ids == (*grown.token_ids, *ids("a"), EOS, *ids("b"))
    (other,) = agent.session.completions("hiyo? so")
    assert other.token_ids == ids("hiyo? so")
    (conversation,) = agent.session.conversations
    assert [turn.text for turn in conversation.turns] == ["yo!", "a"]


def test_tokens_continue_the_longest_conversation_that_they_begin_with() -> None:
    agent = Agent()
    agent.answer(agent.ask(agent.session.tokens([20, 21], "prompt")), "a")
    written = agent.session.conversations[0].tokens
    agent.answer(agent.ask(agent.session.tokens([*written, 30], "prompt")), "b")
    (conversation,) = agent.session.conversations
    assert conversation.tokens[: len(written) + 1] == (*written, 30)
    agent.ask(agent.session.tokens([*written, 31], "prompt"))
    agent.ask(agent.session.tokens(list(written), "prompt"))
    assert [c.context for c in agent.session.conversations] == [(20, 21), (*written, 31), written]


def test_a_resumed_rollout_repeats_its_answers_and_asks_the_engine_for_the_next() -> None:
    agent = Agent()
    agent.play(([HI], "yo"), ([HI, said("yo"), user("a")], "b"))
    agent.answer(agent.chat(HI, said("yo"), user("c"), max_tokens=2), "d", reason="length")
    agent.answer(agent.chat(user("else"), stop=(";",)), "e", stop=";")
    state = AgentGroup(agent.session.request, {1: agent.session}).as_request()
    assert state.partial[0].token_ids == () and len(state.partial[1].branches) == 2
    resumed = Agent(state)
    resumed.chat(HI, name="new")
    resumed.chat(HI, said("yo"), user("a"))
    resumed.chat(HI, said("yo"), user("c"))
    resumed.chat(user("else"), stop=(";",))
    assert not resumed.posted and resumed.session.num_open == 0
    updates = [update for (update,) in resumed.got]
    assert [(u.text, u.reason, u.stop_text) for u in updates] == [
        ("yo", "stop", None),
        ("b", "stop", None),
        ("d", "length", None),
        ("e", "stop", ";"),
    ]
    for mine, theirs in zip(resumed.session.conversations, agent.session.conversations, strict=True):
        assert (mine.tokens, mine.log_probs, mine.loss_mask, mine.versions) == (
            theirs.tokens,
            theirs.log_probs,
            theirs.loss_mask,
            theirs.versions,
        )
        assert mine.turns == theirs.turns and mine.seed == theirs.seed
    next_one = [HI, said("yo"), user("a"), said("b"), user("f")]
    asked = [the_request(each.chat(*next_one)) for each in (resumed, agent)]
    assert asked[0].partial == asked[1].partial and len(resumed.posted) == 1


def test_a_resumed_rollout_repeats_all_answers_to_the_same_prompt_in_their_order() -> None:
    agent = Agent()
    for text in ("ab", "cd"):
        agent.answer(agent.chat(HI), text)
    state = AgentGroup(group_request(), {1: agent.session}).as_request()
    resumed = Agent(state)
    jobs = [resumed.chat(HI) for _ in range(3)]
    assert [update.text for found in resumed.got for update in found] == ["ab", "cd"] and resumed.posted == jobs[2:]


def test_a_repeated_answer_with_its_stop_text_is_shown_whole() -> None:
    part = Rollout((*ids("yo;"), EOS), (-1.0,) * 4, (1,) * 4, (2,) * 4, "aborted", turns=(Turn(0, 4, "yo;"),))
    for include, text in ((True, "yo;"), (False, "yo")):
        agent = Agent(group_request(partial=(Rollout((), (), (), (), "aborted"), part)))
        agent.chat(HI, stop=(";",), include_stop=include)
        assert [u.text for (u,) in agent.got] == [text]


def test_a_user_may_answer_an_inline_call_in_a_turn_of_their_own() -> None:
    agent = Agent(fmt=TAG)
    agent.answer(agent.chat(HI, tools=TOOLS), "<tool>1</tool>")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
    job = agent.chat(HI, {"role": "assistant", "content": "", "tool_calls": [call]}, user("no"), tools=TOOLS)
    assert TOKENIZER.decode(the_request(job).partial[0].token_ids) == "<tool>1</tool><eos>\nno\n"
