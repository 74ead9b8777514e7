"""Completions in OpenAI's form."""

from __future__ import annotations

from typing import Any

from gspo.serving.replies import Update
from gspo.serving.wire.answer import Answer, Choice


class CompletionAnswer(Answer):
    """A completion of one or several prompts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def whole(self) -> dict[str, Any]:
        written = [self._choice(index, choice, 0) for index, choice in enumerate(self.choices)]
        return self.envelope(self.kind, written, usage=self.usage)

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        if not update.text and not update.token_ids and update.reason is None:
            return []
        part = Choice()
        part.add(update)
        shown = len(self.choices[update.index].text) - len(update.text)
        return [self.envelope(self.chunk_kind, [self._choice(update.index, part, shown)])]

    def _choice(self, index: int, choice: Choice, offset: int) -> dict[str, Any]:
        written = {
            "index": index,
            "text": choice.text,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_text,
            "logprobs": self._log_probs(choice, offset) if self.ask.log_probs else None,
        }
        if self.ask.return_token_ids:
            written |= {
                "prompt_token_ids": list(self.prompts[index // self.ask.n].token_ids),
                "token_ids": choice.token_ids,
            }
        return written

    def _log_probs(self, choice: Choice, offset: int) -> dict[str, Any]:
        texts = [self.token_text(token) for token in choice.token_ids]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        tops = [{self.token_text(token): log_prob for token, log_prob in top} for top in choice.top]
        return {
            "tokens": texts,
            "token_logprobs": choice.log_probs,
            "text_offset": offsets[:-1],
            "top_logprobs": tops or None,
        }
