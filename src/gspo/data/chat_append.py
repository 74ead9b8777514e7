"""Messages appended to a conversation whose tokens are fixed: rendered as the difference that they make to a probe chat.

A rollout's tokens are never rendered again. What a chat template writes after the model's turn (the end of that turn,
the new messages, the beginning of the next turn) is found by rendering a short chat with them. It belongs after the
tokens only if the template writes a message the same way wherever it stands; `append_problem` checks that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.data.rows import DataError

Message = Mapping[str, Any]
_QUESTION, _ANSWER = "What is next?", "q7Zk"  # an answer whose text occurs nowhere else


class ChatAppender:
    """Renders messages for one tokenizer. `options` are those with which prompts are rendered, `tools` among them."""

    def __init__(self, tokenizer: Any, /, **options: Any) -> None:
        self._tokenizer = tokenizer
        self._options = {name: value for name, value in options.items() if value is not None}
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def opened(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a whole chat, up to where the model writes."""
        if self._has_template:
            return self.encode(self._render(messages))
        ids = self._tokenizer("\n".join(str(message["content"]) for message in messages))["input_ids"]
        return _without_eos(tuple(map(int, ids)), self._tokenizer)

    def appended(self, messages: Sequence[Message], last_token: int) -> tuple[int, ...]:
        """The tokens that follow a turn whose last token is `last_token`, up to where the model writes again.

        The end of the turn is among them, unless the model wrote it itself.
        """
        tokens = self.encode(self._after_answer(messages))
        return tokens[1:] if tokens[:1] == (last_token,) else tokens

    def turn_end(self, messages: Sequence[Message]) -> int | None:
        """The token with which the template ends a turn that these messages follow; None where it is no special token."""
        first = self.encode(self._after_answer(messages))[:1]
        return first[0] if first and first[0] in self._tokenizer.added_tokens_decoder else None

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, as it is."""
        return tuple(int(t) for t in self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """What a template writes after the text of an answer that these messages follow."""
        if not self._has_template:
            return "\n" + "\n".join(str(message["content"]) for message in messages) + "\n"
        probe = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        return self._render([*probe, *messages]).rpartition(_ANSWER)[2]

    def _render(self, messages: Sequence[Message]) -> str:
        options = {"add_generation_prompt": True, **self._options, "tokenize": False}
        return self._tokenizer.apply_chat_template([dict(message) for message in messages], **options)


def append_problem(tokenizer: Any, role: str, **options: Any) -> str | None:
    """Why messages of a role cannot be appended with this tokenizer's template; None if they can.

    Three chats are rendered whole and by difference: one observation, several at once, and five turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = ChatAppender(tokenizer, **options)
    start = [{"role": "user", "content": "Begin."}]
    observation = {"role": role, "content": "It is 3."} | ({"name": "look"} if role == "tool" else {})
    chats = [[[observation]], [[observation] * 2] if role == "tool" else [[observation]], [[observation]] * 5]
    try:
        return next(filter(None, (_difference(tokenizer, chat, start, turns) for turns in chats)), None)
    except Exception as error:  # whatever a template raises for messages that it does not know
        return f"it refuses messages of the role {role!r} ({type(error).__name__}: {error})"


def _difference(
    tokenizer: Any, chat: ChatAppender, start: list[dict[str, Any]], turns: Sequence[Sequence[Message]]
) -> str | None:
    """Why a chat rendered by difference is not the chat rendered whole; None if it is."""
    messages: list[Message] = list(start)
    tokens = chat.opened(messages)
    for number, observations in enumerate(turns):
        answer = f"Answer {number}."
        end = chat.turn_end(observations)
        tokens += (*chat.encode(answer), *(() if end is None else (end,)))
        tokens += chat.appended(observations, tokens[-1])
        messages += [{"role": "assistant", "content": answer}, *observations]
        whole = chat.opened(messages)
        if tokens != whole:
            place = next((i for i, (a, b) in enumerate(zip(tokens, whole)) if a != b), min(len(tokens), len(whole)))
            got, want = (repr(tokenizer.decode(ids[max(0, place - 4) : place + 8])) for ids in (tokens, whole))
            return f"after {number + 1} turns the chat rendered whole has {want} where the appended one has {got}"
    return None


def require_append(tokenizer: Any, role: str, **options: Any) -> None:
    """Refuse a template to which messages of a role cannot be appended, by name."""
    problem = append_problem(tokenizer, role, **options)
    if problem is not None:
        raise DataError(
            getattr(tokenizer, "name_or_path", "") or "tokenizer",
            f"has a chat template that cannot be appended to: {problem}. Use an inline tool format "
            "(rollout.multi_turn.format=tag or python), or another template (model.tokenizer_path)",
        )


def _without_eos(token_ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """Some tokenizers add EOS to every text; before an answer it must not be there."""
    ends = len(token_ids) > 1 and token_ids[-1] == getattr(tokenizer, "eos_token_id", None)
    return token_ids[:-1] if ends else token_ids
