"""Verdicts on disk: what is kept, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.rewards.judge.cache import Reply, VerdictCache, question_key
from gspo.rewards.protocol import RewardError


def test_the_key_of_a_question_is_its_model_messages_and_sampling() -> None:
    messages = [{"role": "user", "content": "q"}]
    key = question_key("m", messages, {"temperature": 0, "max_tokens": 5})
    assert key == question_key("m", messages, {"max_tokens": 5, "temperature": 0})
    others = [
        question_key("n", messages, {"temperature": 0, "max_tokens": 5}),
        question_key("m", [*messages, *messages], {"temperature": 0, "max_tokens": 5}),
        question_key("m", [{"role": "user", "content": "p"}], {"temperature": 0, "max_tokens": 5}),
        question_key("m", messages, {"temperature": 1, "max_tokens": 5}),
        question_key("m", messages, {"temperature": 0, "max_tokens": 5, "seed": 0}),
    ]
    assert len({key, *others}) == 6


def test_the_cache_keeps_the_first_reply_and_failures_by_place(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "deep" / "cache")
    cache.add("k", "m", Reply("one", 3, 0.25))
    cache.add("k", "m", Reply("two", 4, 0.5))
    assert cache.find("k") == Reply("one", 3, 0.25) and cache.find("other") is None
    cache.add_failure("k", "train/0/1", "first")
    cache.add_failure("k", "train/0/1", "second")
    assert cache.find_failure("k", "train/0/1") == "second"
    assert cache.find_failure("k", "train/0/2") is None and cache.find_failure("j", "train/0/1") is None
    cache.spend(5)
    cache.spend(7)
    cache.close()
    again = VerdictCache(tmp_path / "deep" / "cache")
    assert (again.find("k"), again.spent()) == (Reply("one", 3, 0.25), 12)
    assert again.find_failure("k", "train/0/1") is None  # the session ended in order
    again.close()
    (tmp_path / "broken").write_bytes(b"no database, but long enough to be read as the head of one" * 20)
    with pytest.raises(RewardError, match=r"reward\.judge\.cache='.*broken' cannot be opened"):
        VerdictCache(tmp_path / "broken")
