"""Chat completions in OpenAI's form, with tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.environments.formats import ToolFormat
from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted
from gspo.serving.replies import TopTokens, Update
from gspo.serving.tool_calls import split_calls
from gspo.serving.wire.answer import Answer, Choice, TokenText


class ChatAnswer(Answer):
    """A chat completion. With tools, the calls of a reply are parsed out of its text."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, ask: Ask, prompt: Prompted, token_text: TokenText, tool_format: ToolFormat) -> None:
        super().__init__(model, ask, [prompt], token_text)
        self._format, self._tools = tool_format, prompt.tools
        self._num_shown = [0] * ask.n  # characters of each choice that were streamed

    def whole(self) -> dict[str, Any]:
        written = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        more = {"prompt_token_ids": list(self.prompts[0].token_ids)} if self.ask.return_token_ids else {}
        return self.envelope(self.kind, written, usage=self.usage, **more)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        content, calls = self._split(choice)
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        return {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else choice.reason,
            "stop_reason": choice.stop_text,
            "logprobs": self._log_probs(choice) if self.ask.log_probs else None,
            **({"token_ids": choice.token_ids} if self.ask.return_token_ids else {}),
        }

    def _split(self, choice: Choice) -> tuple[str | None, list[dict[str, Any]]]:
        return split_calls(choice.text, self._format, self._tools) if self._tools else (choice.text, [])

    def opening(self) -> list[dict[str, Any]]:
        more = {"prompt_token_ids": list(self.prompts[0].token_ids)} if self.ask.return_token_ids else {}
        first = {"role": "assistant", "content": ""}
        return [
            self.envelope(self.chunk_kind, [{"index": i, "delta": first, "finish_reason": None}], **more)
            for i in range(self.ask.n)
        ]

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        choice, start = self.choices[update.index], self._num_shown[update.index]
        is_over = update.reason is not None
        calls: list[dict[str, Any]] = []
        if is_over:
            content, calls = self._split(choice)
            text = (content or "")[start:]
        else:
            text = choice.text[start : self._num_sure(choice.text)]
        self._num_shown[update.index] = start + len(text)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        if not delta and not update.token_ids and not is_over:
            return []
        reason = "tool_calls" if calls else update.reason
        written = {"index": update.index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if self.ask.log_probs:
            written["logprobs"] = self._log_probs(update)
        if self.ask.return_token_ids:
            written["token_ids"] = list(update.token_ids)
        return [self.envelope(self.chunk_kind, [written])]

    def _num_sure(self, text: str) -> int:
        """Characters of an unfinished reply that are not part of a tool call, whatever follows."""
        if not self._tools:
            return len(text)
        opening = self._format.opening
        if not opening:
            return 0
        if opening in text:
            return len(self._format.content(text))
        ends = (size for size in range(min(len(opening), len(text)), 0, -1) if opening.startswith(text[-size:]))
        sure = text[: len(text) - next(ends, 0)]
        return len(sure if self._format.inline else sure.rstrip())

    def _log_probs(self, part: Choice | Update) -> dict[str, Any]:
        tops: Sequence[TopTokens] = part.top or [()] * len(part.token_ids)
        return {
            "content": [
                {**self._token(token, log_prob), "top_logprobs": [self._token(*each) for each in top]}
                for token, log_prob, top in zip(part.token_ids, part.log_probs, tops)
            ]
        }

    def _token(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
