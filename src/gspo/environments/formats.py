"""How a model writes tool calls, and how their answers are put back: one class per format.

| format | a call | its answer |
|---|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen writes it | a message of the role `tool` |
| `tokenizer` | what the tokenizer's own response template describes | a message of the role `tool` |
| `python` | a fenced block ```` ```python ```` | a fenced block ```` ```output ````, in the same turn's text |
| `tag` | `<tool>…</tool>` | `<result>…</result>`, in the same text |

The last two are *inline*: the closing text ends a turn, the answer follows it directly, and the model writes on. They
need nothing of the chat template.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo import untrusted
from gspo.environments.protocol import EnvironmentProblem, Message, ToolCall


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`parse` reads the calls of a turn. An inline format also says where its first call ends, and writes answers."""

    name: str
    parse: Callable[[str], tuple[ToolCall, ...]]
    closing: str = ""  # the text that ends a call, and with it the turn; "" when only the end of the message does
    call_end: Callable[[str], int | None] = lambda text: None  # where the first complete call ends in a turn's text
    answer: Callable[[str], str] | None = None  # an inline answer from the contents of the messages
    opening: str = ""  # the text that begins a call; "" when it is not known
    call: Callable[[str], str] | None = None  # an inline call from its input
    read_content: Callable[[str], str] | None = None  # the text beside the calls, where no opening text says it

    @property
    def inline(self) -> bool:
        return self.answer is not None

    def content(self, text: str) -> str:
        """The text of a turn before its first call; spaces before an inline call are part of it."""
        if self.read_content is not None:
            return self.read_content(text)
        before, found, _ = text.partition(self.opening) if self.opening else (text, "", "")
        return before.rstrip() if found and not self.inline else before

    def write(self, function: Mapping[str, Any]) -> str:
        """The text of an inline call, from a function's name and arguments."""
        assert self.call is not None
        return self.call(str(next(iter(function["arguments"].values()), "")))

    def observe(self, messages: Sequence[Message]) -> str:
        """The text of an inline answer."""
        assert self.answer is not None
        return self.answer("\n".join(str(message["content"]) for message in messages))


_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)\n(.*?)\n?```", re.DOTALL)
_TAG = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """Every `<tool_call>` block of a text; one that is no JSON object with a name is a call with an error."""
    return tuple(_read_json_call(body) for body in _HERMES.findall(text))


def read_written_json(text: str) -> Any:
    """The value of JSON that a model wrote; ValueError where it is none, or nested too deeply."""
    with contextlib.suppress(RecursionError):
        value = json.loads(text)
        if untrusted.is_shallow(value):
            return value
    raise ValueError(f"it is nested deeper than {untrusted.MAX_DEPTH} levels")


def _read_json_call(body: str) -> ToolCall:
    try:
        call = read_written_json(body)
    except ValueError as error:
        return ToolCall("", error=f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", error='the tool call must be a JSON object with "name" and "arguments"')
    return _with_arguments(call["name"], call.get("arguments", call.get("parameters", {})))


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    """A call whose arguments are an object, or one as text."""
    if isinstance(arguments, str):
        try:
            arguments = read_written_json(arguments)
        except ValueError:
            return ToolCall(name, error="the arguments of the tool call are not valid JSON")
    if not isinstance(arguments, dict):
        return ToolCall(name, error="the arguments of the tool call must be a JSON object")
    return ToolCall(name, arguments)


def _inline(
    name: str, tool: str, pattern: re.Pattern[str], parts: tuple[str, str, str], answer: Callable[[str], str]
) -> ToolFormat:
    """A format whose first match of `pattern` is the turn's only call; `parts` surround its input, the last one closes."""
    opening, end, closing = parts

    def parse(text: str) -> tuple[ToolCall, ...]:
        found = pattern.search(text)
        return (ToolCall(tool, {"input": found.group(1)}),) if found else ()

    def call_end(text: str) -> int | None:
        found = pattern.search(text)
        return found.end() if found else None

    call = lambda text: opening + text + end + closing  # noqa: E731
    return ToolFormat(name, parse, closing, call_end, answer, opening, call)


HERMES = ToolFormat("hermes", parse_hermes, opening="<tool_call>")
_FENCED = ("```python\n", "\n", "```")
PYTHON = _inline("python", "python", _FENCE, _FENCED, lambda text: f"\n```output\n{text}\n```\n")
TAG = _inline("tag", "", _TAG, ("<tool>", "", "</tool>"), lambda text: f"<result>{text}</result>")
FORMATS = {fmt.name: fmt for fmt in (HERMES, PYTHON, TAG)}


def tokenizer_format(tokenizer: Any) -> ToolFormat:
    """The format that a tokenizer describes itself, by the response template that transformers reads."""

    def parse(text: str) -> tuple[ToolCall, ...]:
        try:
            message = tokenizer.parse_response(text)
        except Exception as error:  # the template's own parser; the model sees what it says
            return (ToolCall("", error=f"the tool call could not be read: {error}"),)
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        return tuple(_with_arguments(str(call.get("name", "")), call.get("arguments", {})) for call in calls)

    def read_content(text: str) -> str:
        return str(tokenizer.parse_response(text).get("content") or "")

    return ToolFormat("tokenizer", parse, read_content=read_content)


def find_format(name: str, tokenizer: Any) -> ToolFormat:
    """The format of a name; `auto` is the tokenizer's own where it has one, else `hermes`."""
    own = any(getattr(tokenizer, attribute, None) for attribute in ("response_template", "response_schema"))
    if name == "auto":
        return tokenizer_format(tokenizer) if own else HERMES
    if name == "tokenizer":
        if not own:
            raise EnvironmentProblem(
                "actor_rollout_ref.rollout.multi_turn.format=tokenizer: this tokenizer has no response template; choose "
                f"{', '.join(FORMATS)}"
            )
        return tokenizer_format(tokenizer)
    return FORMATS[name]


def closing_tokens(closing: str, vocabulary: Sequence[str]) -> tuple[int, ...]:
    """The tokens with which a closing text can end, given the text of every token.

    A token can complete `closing` when it contains it, or when it starts with one of its ends. An engine stops at
    these; whether the closing text is really there is decided on the text.
    """
    ends = tuple(closing[-size:] for size in range(1, len(closing) + 1))
    return tuple(i for i, text in enumerate(vocabulary) if text and (closing in text or text.startswith(ends)))
