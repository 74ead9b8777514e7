"""The text of a response while its tokens come: decoded piece by piece, cut where a stop text begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Decode = Callable[[Sequence[int]], str]
CallEnd = Callable[[str], int | None]  # where the first complete tool call ends in a text
TopTokens = tuple[tuple[int, float], ...]
Reason = Literal["stop", "length"]
INCOMPLETE = "\ufffd"  # the last bytes of the text are the beginning of a character


@dataclass(frozen=True, slots=True)
class Update:
    """What a response gained. `reason` is set when it ended; `stop_text` names the stop text that ended it."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    top: tuple[TopTokens, ...] = ()
    reason: Reason | None = None
    stop_text: str | None = None


class Decoder:
    """Decodes tokens that come in pieces; the pieces of text add up to the text of all tokens.

    Only the last few tokens are decoded again, since the text of a token may depend on the one before.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._complete = 0  # tokens start..complete-1 give context to those after them
        self._num_shown = 0  # characters of the text of the tokens from `start` on

    @property
    def mark(self) -> tuple[int, int, int, int]:
        """Where the decoder stands, for `rewind`."""
        return self._start, self._complete, self._num_shown, len(self._ids)

    def rewind(self, mark: tuple[int, int, int, int]) -> None:
        """Go back to a mark."""
        self._start, self._complete, self._num_shown, size = mark
        del self._ids[size:]

    def feed(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that these tokens add; a character that is not complete waits for its end."""
        self._ids += token_ids
        text = self._decode(self._ids[self._start :])
        sure = text if is_last else text.rstrip(INCOMPLETE)
        new = sure[self._num_shown :]
        if sure == text and self._ids:
            self._start, self._complete = self._complete, len(self._ids)
            self._num_shown = len(self._decode(self._ids[self._start :]))
        else:
            self._num_shown += len(new)
        return new


class Reply:
    """One response. `feed` returns what may be shown; with stop texts, their possible beginnings are held back.

    A reply ends where a stop text begins (with `include_stop`: ends), or where `call_end` finds the end of a tool call
    in its text. Its tokens end with the one that completes that text; what an engine wrote after it is dropped.
    """

    def __init__(
        self,
        index: int,
        decode: Decode,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        call_end: CallEnd | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.is_over = False
        self._decoder, self._stop, self._include, self._call_end = Decoder(decode), tuple(stop), include_stop, call_end
        self._shown = ""  # all text so far, if `call_end` needs it
        self._held = ""

    def feed(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int] = (),
        top: Sequence[TopTokens] = (),
        reason: Reason | None = None,
    ) -> Update:
        """Add tokens; `reason` is set with the last ones."""
        assert not self.is_over
        text, size, stop_text = self._read(token_ids, is_last=reason is not None)
        if stop_text is not None:
            reason = "stop"
        self.num_tokens += size
        self.is_over = reason is not None
        if self._call_end is not None:
            self._shown += text
        return Update(
            self.index,
            text,
            tuple(token_ids[:size]),
            tuple(log_probs[:size]),
            tuple(versions[:size]),
            tuple(top[:size]),
            reason,
            stop_text or None,
        )

    def _read(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, int, str | None]:
        """The text to show, how many of the tokens belong to the reply, and the stop text that ended it ("": a call)."""
        before = self._decoder.mark
        text = self._held + self._decoder.feed(token_ids, is_last=is_last)
        if self._find_end(text) is not None:
            self._decoder.rewind(before)
            return self._cut(token_ids)
        shown = len(text) if is_last else len(text) - self._num_open(text)
        self._held = text[shown:]
        return text[:shown], len(token_ids), None

    def _cut(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """As `_read`, for tokens in which the reply ends."""
        text, found, size = self._held, self._find_end(self._held), 0
        while found is None:
            size += 1
            text += self._decoder.feed(token_ids[size - 1 : size], is_last=size == len(token_ids))
            found = self._find_end(text)
        return text[: found[0]], size, found[1]

    def _find_end(self, text: str) -> tuple[int, str] | None:
        """Where the reply ends in text that is not shown yet, and by which stop text; None if it does not."""
        places = [
            (place + (len(stop) if self._include else 0), stop)
            for stop in self._stop
            if (place := text.find(stop)) >= 0
        ]
        if self._call_end is not None and (end := self._call_end(self._shown + text)) is not None:
            places.append((end - len(self._shown), ""))
        return min(places, default=None)

    def _num_open(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of a stop text."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        ends = (size for size in range(longest, 0, -1) if any(s.startswith(text[-size:]) for s in self._stop))
        return next(ends, 0)
