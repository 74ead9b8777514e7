"""Tokens in, tokens out, in the form of vLLM's `/inference/v1/generate`."""

from __future__ import annotations

from typing import Any

from gspo.serving.replies import Update
from gspo.serving.wire.answer import Answer, Choice


class TokensAnswer(Answer):
    """Token ids and their log-probs."""

    kind = chunk_kind = "generate"
    prefix = "generate"

    def whole(self) -> dict[str, Any]:
        written = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {"request_id": self.id, "choices": written, "usage": self.usage}

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        if not update.token_ids and update.reason is None:
            return []
        part = Choice()
        part.add(update)
        return [{"request_id": self.id, "choices": [self._choice(update.index, part)]}]

    def closing(self) -> list[dict[str, Any]]:
        return [{"request_id": self.id, "choices": [], "usage": self.usage}] if self.ask.include_usage else []

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        written: dict[str, Any] = {
            "index": index,
            "token_ids": choice.token_ids,
            "finish_reason": choice.reason,
            "logprobs": None,
        }
        if self.ask.log_probs:
            tops = choice.top or [()] * len(choice.token_ids)
            written["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": _top(top)}
                    for token, log_prob, top in zip(choice.token_ids, choice.log_probs, tops)
                ]
            }
        return written


def _top(top: Any) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token}", "logprob": log_prob, "bytes": None} for token, log_prob in top]
