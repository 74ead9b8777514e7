"""One rollout of an agent: every request is recorded, and joined to the conversation that it continues."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.environments.formats import ToolFormat
from gspo.rollout.engine import GroupRequest
from gspo.seeding import derive_seed
from gspo.serving.agents.conversation import Conversation, Point
from gspo.serving.errors import ApiError, too_long
from gspo.serving.jobs import Job, Send, name_of
from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted, PromptReader, read_messages, template_errors
from gspo.serving.replies import Update
from gspo.serving.tool_calls import split_calls
from gspo.types import FinishReason, Rollout, Turn

FIRST_PLACE = 1 << 48  # numbers of conversations in the engine; those of prompts are far below
_places = itertools.count(FIRST_PLACE)
Post = Callable[["Session", Job], None]


@dataclass(frozen=True, slots=True)
class SessionPrompt(Prompted):
    """A prompt, and the conversation that it continues; None: it opens one."""

    conversation: Conversation | None = None


class Session:
    """The job queue and the reader of one key. Requests come from the web server's thread, updates from the engine's.

    `request` is the rollout's group; `post` hands jobs to the engine's thread. The sampling parameters are those of the
    group, whatever a client asks for: log-probs must be those of the policy that is trained.
    """

    def __init__(self, request: GroupRequest, index: int, reader: PromptReader, max_length: int, post: Post) -> None:
        self.request, self.index = request, index
        self._reader, self._max_length, self._post = reader, max_length, post
        self._lock = threading.Lock()
        self.conversations: list[Conversation] = []
        # Recorded turns of a resumed rollout by the tokens before them; conversations with equal ones in their order.
        self._tape: dict[tuple[int, ...], list[Rollout]] = {}
        self.num_open = 0  # its requests without an answer
        self.num_writing = 0  # those of them that are in the engine
        self.due = 0  # the tick in which its next request is waited for
        self.thinking_since = time.monotonic()
        self.is_over = False
        self.failure: str | None = None
        if index < len(request.partial):
            self._remember(request.partial[index])

    @property
    def number(self) -> tuple[int, int]:
        """Submission and response: what the rollout is called everywhere."""
        return self.request.submission, self.request.first_response + self.index

    @property
    def is_thinking(self) -> bool:
        """Whether the agent is neither over nor waiting for the model."""
        return not self.is_over and not self.num_open

    @property
    def tool_format(self) -> ToolFormat:
        return self._reader.tool_format

    def chat(self, messages: Any, tools: Sequence[Mapping[str, Any]], options: Any = None) -> Prompted:
        """The tokens of a chat: those of the longest conversation that it continues, and its new messages behind them."""
        known = read_messages(messages)
        shown = [_comparable(message) for message in known]

        def fits(point: Point) -> bool:
            size = len(point.messages)
            return 0 < size < len(shown) and point.tools == tools and shown[:size] == point.messages

        found = self._longest(fits)
        if found is None:
            read = self._reader.chat(messages, tools, options)
            return SessionPrompt(read.token_ids, read.messages, read.tools)
        conversation, point = found
        new, before = known[len(point.messages) :], conversation.tokens[: len(conversation.context) + point.size]
        appender = self._reader.appender(tools, options)
        if self.tool_format.inline and all(message["role"] == "tool" for message in new):
            added = appender.encode(self.tool_format.observe(new))
        else:
            with template_errors():
                added = appender.appended(new, before[-1])
        return SessionPrompt((*before, *added), known, tools, None, self._to_continue(conversation, point))

    def completions(self, prompt: Any) -> list[Prompted]:
        """As `chat`, for a text or tokens."""
        prompts = self._reader.completions(prompt)
        if len(prompts) > 1:
            raise ApiError(400, "prompt: one prompt per request while a model is trained", param="prompt")
        (read,) = prompts
        text = read.text
        if text is None:
            return [self.tokens(list(read.token_ids), "prompt")]
        found = self._longest(lambda point: point.text is not None and text.startswith(point.text))
        if found is None:
            return [SessionPrompt(read.token_ids, text=text)]
        conversation, point = found
        before = conversation.tokens[: len(conversation.context) + point.size]
        added = self._reader.appender(()).encode(text[len(point.text or "") :])
        return [SessionPrompt((*before, *added), (), (), text, self._to_continue(conversation, point))]

    def tokens(self, token_ids: Any, name: str) -> Prompted:
        read = self._reader.tokens(token_ids, name).token_ids

        def is_prefix(conversation: Conversation, point: Point) -> bool:
            size = len(conversation.context) + point.size
            return size < len(read) and conversation.tokens[:size] == read[:size]

        with self._lock:
            ends = [(c, c.points[-1]) for c in self.conversations if c.points]
        found = max((pair for pair in ends if is_prefix(*pair)), key=lambda p: len(p[0].tokens), default=None)
        return SessionPrompt(read, conversation=None if found is None else self._to_continue(*found))

    def _longest(self, fits: Callable[[Point], bool]) -> tuple[Conversation, Point] | None:
        with self._lock:
            points = [(c, point) for c in self.conversations for point in c.points if fits(point)]
        return max(points, key=lambda pair: len(pair[0].context) + pair[1].size, default=None)

    def _to_continue(self, conversation: Conversation, point: Point) -> Conversation | None:
        """The conversation, if the point is its end; a request that goes back to an earlier one opens a branch."""
        return conversation if conversation.points[-1] is point and not conversation.is_busy else None

    def open(self, prompted: Prompted, ask: Ask, send: Send, name: str = "") -> Job:
        """Record a request and hand it to the engine."""
        if self.is_over:
            raise ApiError(410, "this rollout is over", code="rollout_over")
        if ask.n != 1:
            raise ApiError(400, f"n={ask.n}: one answer per request while a model is trained", param="n")
        assert isinstance(prompted, SessionPrompt)
        with self._lock:
            conversation = prompted.conversation or self._new(prompted.token_ids)
            size = len(conversation.token_ids)
            added = prompted.token_ids[len(conversation.tokens) :]
            limit = self._limit(conversation, len(added), ask)
            if prompted.conversation is None:
                self.conversations.append(conversation)
            conversation.observe(added, self.request.version)
            conversation.is_busy = True
            known = self._tape.get(conversation.tokens)
            recorded = known.pop(0) if known else None
            self.num_open += recorded is None
        record = self._recorded(conversation, prompted, ask, send, name, size)
        job = Job(ask, [self._as_request(conversation, limit, ask)], record)
        if recorded is None:
            self._post(self, job)
        else:
            job.send([_repeated(recorded, ask)])
        return job

    def cancel(self, job: Job) -> None:
        """The client left: its answer is still recorded when it is written."""

    def finish(self, failure: str | None) -> None:
        """The agent has returned, or failed."""
        self.failure, self.is_over = failure, True

    def _new(self, context: tuple[int, ...]) -> Conversation:
        """A conversation. The first on the row's own prompt is what a rollout without an agent would be in the engine."""
        is_first = all(c.place != self.number for c in self.conversations)
        if is_first and context == self.request.prompt.token_ids:
            return Conversation(context, self.number, self.request.seed)
        same = sum(c.context == context for c in self.conversations)
        digest = int(hashlib.sha256(repr((context, same)).encode()).hexdigest()[:15], 16)
        return Conversation(
            context, (next(_places), self.number[1]), derive_seed(self.request.seed, "branch", *self.number, digest)
        )

    def _limit(self, conversation: Conversation, num_added: int, ask: Ask) -> int:
        """Most tokens of the conversation's response, observations included."""
        before = len(conversation.token_ids) + num_added
        most = min(self.request.params.max_tokens, self._max_length - len(conversation.context))
        if before >= most:
            conversation.reason = "length"
            raise too_long(len(conversation.context) + before, 1, len(conversation.context) + most)
        return min(most, before + ask.params.max_tokens)

    def _as_request(self, conversation: Conversation, limit: int, ask: Ask) -> GroupRequest:
        uid, submission = self.request.prompt.uid, conversation.place[0]
        prompt = dataclasses.replace(
            self.request.prompt, uid=name_of(uid, self.number[1]), token_ids=conversation.context
        )
        begun = conversation.rollout("aborted", conversation.context)
        stops = (*self.request.params.stop_token_ids, *ask.params.stop_token_ids)
        return dataclasses.replace(
            self.request,
            prompt=prompt,
            submission=submission,
            n=1,
            params=dataclasses.replace(self.request.params, max_tokens=limit, stop_token_ids=stops),
            seed=conversation.seed,
            partial=(dataclasses.replace(begun, turns=(), text=""),) if begun.token_ids else (),
            first_response=self.number[1],
            hold=True,
            watch=bool(ask.stop) or ask.call_end is not None,
            draw=None if submission == self.number[0] else self.number[0],
        )

    def _recorded(
        self, conversation: Conversation, prompted: SessionPrompt, ask: Ask, send: Send, name: str, size: int
    ) -> Send:
        """`send` that records what passes. After an error the conversation has the `size` tokens that it had before."""
        start, text = len(conversation.token_ids), ""

        def record(found: list[Update] | ApiError) -> None:
            nonlocal text
            if isinstance(found, ApiError):
                conversation.rewind(size)
                send(found)
                return
            for update in found:
                text += update.text
                conversation.write(update.token_ids, update.log_probs, update.versions)
                if update.reason is not None:
                    stop = "" if ask.include_stop else update.stop_text or ""
                    self._end_turn(conversation, prompted, start, text, stop, name, update.reason)
            send(found)

        return record

    def _end_turn(
        self,
        conversation: Conversation,
        prompted: SessionPrompt,
        start: int,
        text: str,
        stop: str,
        name: str,
        reason: FinishReason,
    ) -> None:
        content, calls = split_calls(text, self.tool_format, prompted.tools) if prompted.tools else (text, [])
        said = {"role": "assistant", "content": content or "", **({"tool_calls": calls} if calls else {})}
        messages = [_comparable(m) for m in read_messages([*prompted.messages, said])] if prompted.messages else ()
        size = len(conversation.token_ids)
        whole = None if prompted.text is None else prompted.text + text + stop
        turn = Turn(start, size, text + stop, num_calls=len(calls), truncated=reason == "length")
        with self._lock:
            conversation.end_turn(turn, name, Point(size, messages, prompted.tools, whole), reason)

    def answered(self) -> None:
        """A request that was posted has its answer, which the agent gets now."""
        with self._lock:
            self.num_open -= 1
            self.thinking_since = time.monotonic()

    def _remember(self, rollout: Rollout) -> None:
        """Keep the turns of a rollout that was begun elsewhere: the agent gets the same answers when it runs again."""
        for part in (rollout, *rollout.branches):
            context = part.context or self.request.prompt.token_ids
            for turn in part.turns:
                span = slice(turn.start, turn.end)
                reason: FinishReason = "length" if turn.truncated else "stop"
                recorded = (part.token_ids[span], part.log_probs[span], (), part.versions[span], reason, turn.text)
                before = (*context, *part.token_ids[: turn.start])
                self._tape.setdefault(before, []).append(Rollout(*recorded))


def _repeated(recorded: Rollout, ask: Ask) -> Update:
    """A recorded turn as the answer to the request that it answered before."""
    stops = () if ask.include_stop else ask.stop
    stop = next((stop for stop in stops if recorded.text.endswith(stop)), None)
    text = recorded.text if stop is None else recorded.text.removesuffix(stop)
    reason = "length" if recorded.finish_reason == "length" else "stop"
    parts = (recorded.token_ids, recorded.log_probs, recorded.versions)
    return Update(0, text, *parts, reason=reason, stop_text=stop)


def _comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what a client may change when it sends it back: ids, and an empty text that was null."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": message["content"], "calls": calls}
