"""From the messages or texts of a request to the tokens that the model continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gspo.data.chat_append import ChatAppender
from gspo.environments.formats import ToolFormat, read_written_json
from gspo.serving.errors import ApiError, bad_value

MAX_PROMPTS = 128  # of one request
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Prompted:
    """The tokens of a prompt, and what they were made of: messages with tools, or a text."""

    token_ids: tuple[int, ...]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one tokenizer. `tool_format` is how the model writes tool calls."""

    tokenizer: Any
    vocabulary_size: int
    tool_format: ToolFormat
    template_options: Mapping[str, Any]

    def chat(self, messages: Any, tools: Sequence[Mapping[str, Any]], options: Any = None) -> Prompted:
        """A chat, up to where the model writes."""
        known, appender = read_messages(messages), self.appender(tools, options)
        rendered, written = split_inline(known, self.tool_format) if self.tool_format.inline else (known, "")
        with template_errors():
            tokens = appender.opened(rendered)
        tokens = self._not_empty((*tokens, *(appender.encode(written) if written else ())), "messages")
        return Prompted(tokens, known, tools)

    def appender(self, tools: Sequence[Mapping[str, Any]], options: Any = None) -> ChatAppender:
        """What renders messages with these tools."""
        if options is not None and not isinstance(options, dict):
            raise bad_value("chat_template_kwargs", options, "an object")
        if "chat_template" in (options or {}):  # a program of the client, which could run for ever
            raise ApiError(400, "chat_template_kwargs: a template of your own is not supported", param="chat_template")
        shown = {"tools": [dict(tool) for tool in tools]} if tools and not self.tool_format.inline else {}
        return ChatAppender(self.tokenizer, **{**self.template_options, **(options or {}), **shown})

    def completions(self, prompt: Any) -> list[Prompted]:
        """The prompts of a completion: a text, tokens, or a list of either."""
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = prompt if several else [prompt]
        if len(prompts) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: {len(prompts)} prompts; expected at most {MAX_PROMPTS}", param="prompt")
        return [self._one(each) for each in prompts]

    def _one(self, prompt: Any) -> Prompted:
        if isinstance(prompt, str):
            tokens = tuple(map(int, self.tokenizer(prompt)["input_ids"]))
            return Prompted(self._not_empty(tokens, "prompt"), text=prompt)
        return self.tokens(prompt, "prompt")

    def tokens(self, token_ids: Any, name: str) -> Prompted:
        """A list of tokens of the vocabulary."""
        if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
            raise bad_value(name, token_ids, "a text or a list of tokens")
        wrong = [token for token in token_ids if not 0 <= token < self.vocabulary_size]
        if wrong:
            raise bad_value(name, wrong[0], f"tokens from 0 to {self.vocabulary_size - 1}")
        return Prompted(self._not_empty(tuple(token_ids), name))

    def _not_empty(self, token_ids: tuple[int, ...], name: str) -> tuple[int, ...]:
        if not token_ids:
            raise ApiError(400, f"{name}: no tokens; expected at least one", param=name)
        return token_ids


@contextmanager
def template_errors() -> Iterator[None]:
    """Whatever a template raises for messages that it does not know, as an error of the request."""
    try:
        yield
    except Exception as error:
        message = f"messages: the model's chat template refuses them: {error}"
        raise ApiError(400, message, param="messages") from error


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Chat messages in the form that templates expect: contents are texts, arguments of tool calls are objects."""
    if not isinstance(messages, list) or not messages:
        raise bad_value("messages", messages, "a list of at least one message")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ApiError(400, f"{where}: expected an object with a role of {', '.join(ROLES)}", param=where)
    read = {"role": message["role"], "content": _read_content(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    return read


def _read_content(content: Any, where: str) -> str:
    """A text; the texts of a list of parts are joined."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise ApiError(400, f"{where}.content: expected a text, or parts of type text", param=f"{where}.content")
    return "".join(found)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where}: expected objects with function.name and function.arguments", param=where)
        arguments = function.get("arguments") or "{}"
        try:
            found = read_written_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ApiError(400, f"{where}: arguments {arguments!r:.100} are no JSON object", param=where)
        read.append({"type": "function", "function": {"name": function["name"], "arguments": found}})
        if isinstance(call.get("id"), str):
            read[-1]["id"] = call["id"]
    return read


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools as JSON schemas of functions."""
    if not isinstance(tools, list):
        raise bad_value("tools", tools, "a list")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value("tools", tool, 'objects {"type": "function", "function": {"name": …, "parameters": …}}')
    return tools


def split_inline(messages: Sequence[dict[str, Any]], fmt: ToolFormat) -> tuple[list[dict[str, Any]], str]:
    """Messages without tool calls, and the text that the model's open turn has already.

    An inline format has calls and their answers in the text of one turn of the model: here they are put back into it.
    """
    joined: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    is_open = False  # whether the last message is a turn of the model that goes on
    for message in messages:
        if message["role"] == "tool":
            answers.append(message)
            continue
        if answers and is_open:
            joined[-1]["content"] += fmt.observe(answers)
            answers = []
        text = message["content"] + "".join(fmt.write(call["function"]) for call in message.get("tool_calls", ()))
        if message["role"] == "assistant" and is_open:
            joined[-1]["content"] += text
        else:
            joined.append({"role": message["role"], "content": text})
        is_open = message["role"] == "assistant" and "tool_calls" in message
    if not answers:
        return joined, ""
    if not is_open:
        raise ApiError(400, "messages: a message of the role tool answers no tool call", param="messages")
    return joined[:-1], joined[-1]["content"] + fmt.observe(answers)
