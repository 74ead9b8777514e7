"""Verdicts on disk: what is kept and for whom, files that several runs share, and files that are damaged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gspo.rewards.judge.cache import Reply, VerdictCache, question_key
from gspo.rewards.judge.questions import Question
from gspo.rewards.protocol import RewardError
from tests.rewards.judge.answering import Answering, groups, scores_of


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


def damaged(file: Path, part: str) -> None:
    VerdictCache(file).close()
    data = bytearray(file.read_bytes())
    if part == "all":
        data[:] = b"no database, but long enough to be read as the head of one" * 20
    elif part == "the end":
        del data[5000:]
    else:
        data[4096:] = b"x" * (len(data) - 4096)
    file.write_bytes(data)


@pytest.mark.parametrize("part", ["all", "the end", "the pages"])
def test_a_damaged_file_of_verdicts_is_named_with_a_remedy(tmp_path: Path, part: str) -> None:
    damaged(tmp_path / "broken", part)
    with pytest.raises(
        RewardError, match=r"reward\.judge\.cache='.*broken' cannot be opened: .*; it is damaged, or no "
    ):
        VerdictCache(tmp_path / "broken")


def test_a_file_that_is_damaged_while_it_is_used_is_an_error_with_its_name(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "verdicts")
    for number in range(2000):
        cache.add(str(number), "m", Reply("x" * 100, 1, 0.5))
    cache.close()
    cache = VerdictCache(tmp_path / "verdicts")
    with (tmp_path / "verdicts").open("r+b") as file:
        file.seek(8192)
        file.write(b"x" * 100_000)
    with pytest.raises(OSError, match=r"the verdicts of the judge cannot be kept: .*damaged.*: '.*/verdicts'$"):
        for number in range(2000):
            cache.find(str(number))
    cache.close()


def test_other_tables_a_folder_and_a_file_as_a_folder_are_no_file_of_verdicts(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other")) as db:
        db.execute("CREATE TABLE verdicts (name TEXT)")
    (tmp_path / "folder").mkdir()
    for name, said in (("other", "no such column"), ("folder", "writable"), ("other/deeper", "name another file")):
        with pytest.raises(RewardError, match=f"reward.judge.cache='.*{name}' cannot be .*{said}"):
            VerdictCache(tmp_path / name)


def test_what_cannot_be_read_in_a_file_of_verdicts_is_asked_again(tmp_path: Path) -> None:
    """An entry that was changed by hand, or the reply to a question of one's own about another kind of verdict."""
    for number, change in enumerate(
        ("reply = x'ff00'", "reply = NULL", "reply = 'right'", "tokens = 'many', seconds = 'x'")
    ):
        file = tmp_path / str(number)
        first = Answering(lambda text, sampling: '{"score": 5}', cache=VerdictCache(file))
        assert scores_of(first, ("x",)) == [0.5]
        first.close()
        with closing(sqlite3.connect(file)) as db:
            db.execute(f"UPDATE verdicts SET {change}")
            db.commit()
        again = Answering(lambda text, sampling: '{"score": 8}', cache=VerdictCache(file))
        assert scores_of(again, ("x",), ("x",)) == ([0.5, 0.5] if number == 3 else [0.8, 0.8])
        assert len(again.asked) == (0 if number == 3 else 1)
        again.close()
        last = Answering(lambda text, sampling: '{"score": 1}', cache=VerdictCache(file))
        assert scores_of(last, ("x",)) == ([0.5] if number == 3 else [0.8])  # it is kept now
        last.close()


def test_where_another_run_was_faster_its_verdict_counts(tmp_path: Path) -> None:
    """As it would after a resume, which reads it from the file."""
    other = VerdictCache(tmp_path / "shared", "other ")

    def answer(text: str, sampling: Any) -> str:
        messages = Question(scorer.settings, groups(("x",))[0].prompt, ("x",)).messages()
        other.add(question_key("m", messages, sampling), "m", Reply('{"score": 2}', 7, 0.25))
        return '{"score": 9}'

    scorer = Answering(answer, cache=VerdictCache(tmp_path / "shared", "mine "))
    assert scores_of(scorer, ("x",)) == [0.2]
    assert scorer.cache.spent() == 10 and other.spent() == 0  # but what was asked was paid for
    scorer.close()
    other.close()


def test_runs_that_share_a_file_have_their_own_failures_and_budgets(tmp_path: Path) -> None:
    one, two = (VerdictCache(tmp_path / "shared", name) for name in ("one ", "two "))
    for cache, tokens in ((one, 5), (two, 7)):
        cache.spend(tokens)
    for place in ("train/0/1", "held out/0/1"):
        one.add_failure("k", place, "of one")
    two.add_failure("k", "train/0/1", "of two")
    assert (one.spent(), two.spent()) == (5, 7)
    assert one.find_failure("k", "train/0/1") == "of one" and two.find_failure("k", "train/0/1") == "of two"
    one.close("train/")
    again = VerdictCache(tmp_path / "shared", "one ")
    assert again.find_failure("k", "train/0/1") is None and again.find_failure("k", "held out/0/1") == "of one"
    assert two.find_failure("k", "train/0/1") == "of two" and again.spent() == 5
    again.close()
    two.close()


def test_the_tokens_of_a_file_of_an_older_version_count(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "old")) as db:
        db.execute("CREATE TABLE spent (tokens INTEGER)")
        db.execute("INSERT INTO spent VALUES (40)")
        db.commit()
    cache = VerdictCache(tmp_path / "old")
    cache.spend(2)
    assert cache.spent() == 42
    cache.close()


def test_a_file_that_another_program_holds_is_said(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "verdicts")
    cache._db.execute("PRAGMA busy_timeout = 10")
    with closing(sqlite3.connect(tmp_path / "verdicts", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match=r"cannot be kept: database is locked; another program uses it"):
            cache.add("k", "m", Reply("yes", 1, 0.5))
        cache.close()  # does not wait long
