"""What a turn's tokens say, and which tokens answer it: tool calls, closing texts, observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.data.chat_append import ChatAppender
from gspo.environments.formats import ToolFormat, closing_tokens
from gspo.environments.protocol import Action, ToolCall
from gspo.types import Prompt

TRUNCATED = "...(truncated)..."
Side = Literal["left", "middle", "right"]


@dataclass(frozen=True, slots=True)
class DialogueSettings:
    """Limits of a conversation; None: no limit."""

    max_turns: int | None = None  # of the model
    max_observations: int | None = None
    max_calls: int = 1  # per turn
    max_observation: int = 1024  # tokens per message
    truncate_side: Side = "middle"  # the part that is kept: verl's names

    def ends_after(self, num_turns: int) -> bool:
        """Whether no turn may follow this many."""
        return num_turns == self.max_turns or (self.max_observations or num_turns) < num_turns


class Dialogue:
    """Reads turns and writes observations, for one tokenizer and one tool format (None: the environment has no tools)."""

    def __init__(
        self,
        tokenizer: Any,
        chat: ChatAppender,
        tool_format: ToolFormat | None,
        settings: DialogueSettings,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer, self._chat, self._format = tokenizer, chat, tool_format
        self.settings = settings
        self._eos = frozenset(eos_token_ids)
        self.stop_token_ids = self._stops()

    def _stops(self) -> tuple[int, ...]:
        """The tokens at which an engine stops besides the model's own: those that can end a closing text."""
        if self._format is None or not self._format.closing:
            return ()
        whole = self._chat.encode(self._format.closing)
        if len(whole) == 1 and whole[0] in self._tokenizer.added_tokens_decoder:
            return whole  # a token of its own: no other spells it
        vocabulary = [
            self._tokenizer.decode([token], skip_special_tokens=False) for token in range(len(self._tokenizer))
        ]
        return tuple(token for token in closing_tokens(self._format.closing, vocabulary) if token not in self._eos)

    @property
    def has_tools(self) -> bool:
        return self._format is not None

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a turn, without the token that ends it."""
        own = token_ids[:-1] if token_ids and token_ids[-1] in self._eos else token_ids
        return self._tokenizer.decode(list(own), skip_special_tokens=False)

    def turn_length(self, token_ids: Sequence[int], *, was_cut: bool) -> int | None:
        """How many of these tokens are the turn: up to the end of a closing text; None if the turn is not over."""
        ends = self._format.call_end if self._format is not None else _nowhere
        if ends(self.text(token_ids)) is not None:
            return self._shortest(token_ids, lambda text: ends(text) is not None)
        return len(token_ids) if was_cut or token_ids[-1] in self._eos or not self.stop_token_ids else None

    def _shortest(self, token_ids: Sequence[int], is_whole: Callable[[str], bool]) -> int:
        """The fewest tokens whose text has the property."""
        size = len(token_ids)
        while size > 1 and is_whole(self.text(token_ids[: size - 1])):
            size -= 1
        return size

    def action(self, token_ids: Sequence[int], turn: int, *, was_cut: bool) -> Action:
        """A turn as the environment sees it."""
        text = self.text(token_ids)
        calls = self._format.parse(text) if self._format is not None else ()
        most = self.settings.max_calls
        if len(calls) > most:
            late = ToolCall(calls[most].name, error=f"at most {most} call{'s' * (most > 1)} per turn")
            calls = (*calls[:most], late)
        return Action(text, calls, tuple(token_ids), turn, was_cut, self.settings.ends_after(turn + 1))

    def opened(self, prompt: Prompt, opening: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens of a prompt that an environment's first messages follow."""
        return self._chat.opened([*prompt.messages, *opening])

    def observation(self, messages: Sequence[Mapping[str, Any]], last_token: int) -> tuple[tuple[int, ...], int]:
        """The tokens that follow a turn: the messages, as the tool format or the chat template writes them.

        With them, how many messages were too long and cut.
        """
        contents = [self._cut(str(message["content"])) for message in messages]
        num_cut = sum(content != str(message["content"]) for content, message in zip(contents, messages))
        shown = [{**message, "content": content} for content, message in zip(contents, messages)]
        if self._format is not None and self._format.inline:
            return self._chat.encode(self._format.observe(shown)), num_cut
        return self._chat.appended(shown, last_token), num_cut

    def _cut(self, content: str) -> str:
        """A content of at most `max_observation` tokens."""
        limit, side = self.settings.max_observation, self.settings.truncate_side
        ids = self._chat.encode(content)
        if len(ids) <= limit:
            return content
        head = {"left": limit, "middle": limit // 2, "right": 0}[side]
        parts = (ids[:head], ids[len(ids) - (limit - head) :])
        first, last = (self._tokenizer.decode(list(part), skip_special_tokens=False) if part else "" for part in parts)
        return first + TRUNCATED + last


def _nowhere(text: str) -> int | None:
    return None
