"""The signatures of reward functions: how each is recognised and called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from gspo.rewards.protocol import RewardError
from gspo.types import Prompt, Turn

Style = Literal["gspo", "verl", "verl_batch", "trl", "areal"]

_EXPECTED = (
    "expected one of (prompt, response); (data_source, solution_str, ground_truth, extra_info); "
    "(data_sources, solution_strs, ground_truths, extra_infos); "
    "(completions, **columns); (prompt, completions, prompt_ids, completion_ids, **data)"
)


class Response(str):
    """The text of a response, with its tokens, its number in the group and the reason why it ended.

    With an environment the text is that of the last turn, `turns` has all of them, and the tokens are the model's.
    """

    token_ids: tuple[int, ...]
    index: int
    finish_reason: str
    turns: tuple[Turn, ...]

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int] = (),
        index: int = 0,
        finish_reason: str = "stop",
        turns: Sequence[Turn] = (),
    ) -> Response:
        self = super().__new__(cls, text)
        self.token_ids, self.index, self.finish_reason = tuple(token_ids), index, finish_reason
        self.turns = tuple(turns)
        return self

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def detect_style(fn: Callable[..., Any], name: str, kwargs: Collection[str] = ()) -> Style:
    """Which of the signatures `fn` has, recognised by the names of its parameters. `kwargs` are those set already."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"the signature of reward function {name} cannot be read; {_EXPECTED}") from error
    names = {p.name for p in parameters}
    unknown = sorted(set(kwargs) - names)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise RewardError(f"reward function {name} has no parameter {unknown[0]!r}; kwargs may set {_settable(fn)}")
    parameters = [p for p in parameters if p.name not in kwargs]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if "solution_strs" in names:
        return "verl_batch"
    if "solution_str" in names or {"data_source", "ground_truth"} <= names:
        return "verl"
    if "completions" in names:
        return "areal" if "prompt" in names or "prompt_ids" in names else "trl"
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(positional) >= 2 and len(required) <= 2:
        if keywords:
            raise RewardError(f"reward function {name} needs a value of {', '.join(keywords)}; set it in kwargs")
        return "gspo"
    shown = ", ".join(str(p).split(":")[0].split("=")[0].strip() for p in parameters)
    raise RewardError(f"reward function {name}({shown}) has an unknown signature; {_EXPECTED}")


def _settable(fn: Callable[..., Any]) -> str:
    """The parameters of a function that its settings may set."""
    parameters = list(inspect.signature(fn).parameters.values())
    return ", ".join(p.name for p in parameters[2:] if p.kind is not p.VAR_POSITIONAL) or "none"


def call(fn: Callable[..., Any], style: Style, prompt: Prompt, responses: Sequence[Response]) -> Any:
    """Call `fn` in its style: with all `responses` (trl, verl_batch) or with the first. May return an awaitable."""
    response = responses[0]
    if style == "gspo":
        return fn(prompt, response)
    if style == "verl":
        values = {
            "data_source": prompt.data_source,
            "solution_str": str(response),
            "ground_truth": prompt.ground_truth,
            "extra_info": dict(prompt.extra),
        }
        return fn(**_accepted(fn, values))
    if style == "verl_batch":
        n = len(responses)
        lists = {
            "data_sources": [prompt.data_source] * n,
            "solution_strs": [str(r) for r in responses],
            "ground_truths": [prompt.ground_truth] * n,
            "extra_infos": [dict(prompt.extra) for _ in responses],
        }
        return fn(**_accepted(fn, lists))
    if style == "areal":
        data = {"prompt_ids": list(prompt.token_ids), "completion_ids": list(response.token_ids)}
        data |= {k: v for k, v in _columns(prompt).items() if k not in ("prompt", "completions", *data)}
        return fn(**_accepted(fn, {"prompt": prompt_text(prompt), "completions": str(response)} | data))
    return _call_trl(fn, prompt, responses)


def _call_trl(fn: Callable[..., Any], prompt: Prompt, responses: Sequence[Response]) -> Any:
    """Call with texts first; a function written for chats raises a TypeError then, and is called with messages."""
    n = len(responses)
    columns = {key: [value] * n for key, value in _columns(prompt).items()}
    columns |= {"completion_ids": [list(r.token_ids) for r in responses], "trainer_state": None}
    texts = {"prompts": [prompt_text(prompt)] * n, "completions": [str(r) for r in responses]}
    try:
        return fn(**_accepted(fn, columns | texts))
    except TypeError as error:
        chats = {
            "prompts": [[dict(m) for m in prompt.messages] for _ in responses],
            "completions": [_chat(r) for r in responses],
        }
        try:
            return fn(**_accepted(fn, columns | chats))
        except Exception:
            raise error from None


def _chat(response: Response) -> list[dict[str, str]]:
    """A response as messages: with an environment every turn and what came back, else one message."""
    if not response.turns:
        return [{"role": "assistant", "content": str(response)}]
    chat = []
    for turn in response.turns:
        chat.append({"role": "assistant", "content": turn.text})
        if turn.observation:
            chat.append({"role": "tool", "content": turn.observation})
    return chat


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text: its messages' contents, one after another."""
    return "\n".join(str(message.get("content", "")) for message in prompt.messages)


def _columns(prompt: Prompt) -> dict[str, Any]:
    own = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "answer": prompt.ground_truth}
    return own | dict(prompt.extra)


def _accepted(fn: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for which `fn` has a parameter, without those that are bound already."""
    parameters = inspect.signature(fn).parameters
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in values.items() if k not in bound and (open_ended or k in parameters)}


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives a coroutine."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
