"""Text from tokens that come in pieces, and where stop texts cut it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.environments.formats import PYTHON, TAG
from gspo.serving.replies import Reply

BYTES = st.text(alphabet="ab é漢🙂<>/", max_size=24)


def decode(token_ids: Sequence[int]) -> str:
    """A tokenizer of bytes: a character may span tokens."""
    return bytes(token_ids).decode(errors="replace")


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(places)]


def read(reply: Reply, parts: Sequence[Sequence[int]]) -> tuple[str, list[int], str | None]:
    """Feed the parts, the last one as the end."""
    text, tokens, stop = "", [], None
    for number, part in enumerate(parts or [[]]):
        update = reply.feed(part, [0.0] * len(part), reason="length" if number + 1 >= len(parts) else None)
        text, stop = text + update.text, update.stop_text
        tokens += update.token_ids
        if reply.is_over:
            break
    return text, tokens, stop


@given(BYTES, st.lists(st.integers(0, 200), max_size=6))
def test_the_pieces_add_up_to_the_text(text: str, cuts: list[int]) -> None:
    ids = list(text.encode())
    assert read(Reply(0, decode), pieces(ids, cuts)) == (text, ids, None)


@given(BYTES, st.lists(st.integers(0, 200), max_size=6), st.sampled_from(["</", "a", "é漢", "ab<"]), st.booleans())
def test_a_stop_text_cuts_where_it_begins_however_tokens_arrive(
    text: str, cuts: list[int], stop: str, include: bool
) -> None:
    ids = list(text.encode())
    shown, tokens, found = read(Reply(0, decode, [stop, "never"], include), pieces(ids, cuts))
    if stop not in text:
        assert (shown, tokens, found) == (text, ids, None)
        return
    place = text.index(stop)
    assert found == stop
    assert shown == text[: place + (len(stop) if include else 0)]
    assert tokens == list(text[: place + len(stop)].encode())


def test_of_two_stop_texts_in_one_token_the_one_that_begins_first_counts() -> None:
    words = {1: "a", 2: "bc"}
    reply = Reply(0, lambda ids: "".join(words[i] for i in ids), ["c", "b"])
    assert read(reply, [[1, 2]]) == ("a", [1, 2], "b")


def test_the_beginning_of_a_stop_text_is_held_back_until_it_is_decided() -> None:
    reply = Reply(0, decode, ["</tool>"])
    shown = [reply.feed(list(part.encode()), [0.0] * len(part)).text for part in ("x</to", "y</tool", "s")]
    assert shown == ["x", "</toy", "</tools"]


@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_tool_call_ends_the_reply_and_belongs_to_it(size: int) -> None:
    """Also a call whose closing text is a part of its opening."""
    for fmt, call in ((TAG, "<tool>1</tool>"), (PYTHON, "```python\n1\n```")):
        reply = Reply(0, decode, ["never"], call_end=fmt.call_end)
        raw = f"a {call}b".encode()
        text = tokens = b""
        for start in range(0, len(raw), size):
            if not reply.is_over:
                update = reply.feed(raw[start : start + size], [0.0] * size)
                text, tokens = text + update.text.encode(), tokens + bytes(update.token_ids)
        assert text == tokens == f"a {call}".encode()
        assert (update.reason, update.stop_text) == ("stop", None)
