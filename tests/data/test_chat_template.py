from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gspo.data import chat_template
from gspo.data.chat_template import cut, encode_answer, encode_answers, encode_prompt, encode_prompts, encode_rows
from gspo.data.rows import DataError, Row, user_message
from gspo.models.load import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("embedded")


def row(text: str, uid: str = "r") -> Row:
    return Row(uid, user_message(text), "math", "1", extra={"k": 1})


def test_chat_template_is_applied_and_fields_are_kept(tokenizer: Any) -> None:
    prompt = encode_prompt(row("1+1="), tokenizer)
    assert tokenizer.decode(list(prompt.token_ids)) == "<user>1+1=<assistant>"
    assert (prompt.uid, prompt.data_source, prompt.ground_truth, prompt.extra) == ("r", "math", "1", {"k": 1})


def test_template_arguments_reach_the_template(tokenizer: Any) -> None:
    prompt = encode_prompt(row("1"), tokenizer, add_generation_prompt=False)
    assert tokenizer.decode(list(prompt.token_ids)) == "<user>1"
    (same,) = encode_prompts([row("1")], tokenizer, max_prompt_length=2, add_generation_prompt=False)
    assert same == prompt


def test_whole_conversations_are_shown(tokenizer: Any) -> None:
    messages = (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    prompt = encode_prompt(Row("r", messages), tokenizer)
    assert tokenizer.decode(list(prompt.token_ids)) == "<system>S<user>a<assistant>b<eos><user>c<assistant>"


def test_without_a_template_contents_are_joined_and_no_eos_closes_the_prompt() -> None:
    class Plain:
        chat_template = None
        eos_token_id = 9

        def __call__(self, text: str) -> dict[str, list[int]]:
            self.seen = text
            return {"input_ids": [1, 5, 6, 9]}

    plain = Plain()
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})
    assert encode_prompt(Row("r", messages), plain).token_ids == (1, 5, 6)
    assert plain.seen == "S\nQ"


def test_a_message_the_template_refuses_names_the_row(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"row7: field 'prompt'.*tool"):
        encode_prompt(Row("row7", ({"role": "tool", "content": "x"},)), tokenizer)


def test_an_answer_ends_with_eos(tokenizer: Any) -> None:
    ids = encode_answer("75", tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(list(ids)) == "75<eos>"


@pytest.mark.parametrize(
    ("truncation", "shown"), [("left", "3456<assistant>"), ("right", "<user>1234"), ("middle", "<user>156<assistant>")]
)
def test_truncation(tokenizer: Any, truncation: Any, shown: str) -> None:
    (prompt,) = encode_prompts([row("123456")], tokenizer, max_prompt_length=5, truncation=truncation)
    assert tokenizer.decode(list(prompt.token_ids)) == shown


def test_over_long_prompts_are_an_error_or_filtered(tokenizer: Any) -> None:
    rows = [row("1", "a"), row("123456789", "b"), row("2", "c")]
    with pytest.raises(DataError, match=r"b: field 'prompt' is 11 tokens.*max_prompt_length=5"):
        encode_prompts(rows, tokenizer, max_prompt_length=5)
    kept = encode_prompts(rows, tokenizer, max_prompt_length=5, filter_overlong_prompts=True)
    assert [p.uid for p in kept] == ["a", "c"]
    assert len(encode_prompts(rows, tokenizer, max_prompt_length=11)) == 3
    with pytest.raises(DataError, match="left no prompt"):
        encode_prompts(rows, tokenizer, max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(DataError, match="truncation"):
        encode_prompts(rows, tokenizer, truncation="top")  # pyright: ignore[reportArgumentType]


def test_special_tokens_come_from_the_template_alone() -> None:
    """A template writes its own BOS; a tokenizer that adds one to every text must not add a second."""

    class WithBos:
        chat_template = "template"
        eos_token_id = 9

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            assert options["add_generation_prompt"] is True and options["tokenize"] is False
            return "<bos>" + messages[0]["content"]

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = [1] * text.count("<bos>") + [5]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    assert encode_prompt(row("q"), WithBos()).token_ids == (1, 5)
    assert encode_answer("a", WithBos()) == (5, 9)


@pytest.mark.parametrize(
    ("truncation", "limit", "kept"),
    [
        ("left", 3, (4, 5, 6)),
        ("right", 3, (0, 1, 2)),
        ("middle", 3, (0, 5, 6)),
        ("middle", 4, (0, 1, 5, 6)),
        ("middle", 1, (6,)),
        ("left", 7, (0, 1, 2, 3, 4, 5, 6)),
        ("right", 6, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_a_cut_keeps_as_many_tokens_as_its_limit(truncation: Any, limit: int, kept: tuple[int, ...]) -> None:
    assert cut(tuple(range(7)), limit, truncation) == kept


def test_what_is_left_out_is_said_with_the_length_that_would_keep_it(tokenizer: Any) -> None:
    rows = [row("1" * n, str(n)) for n in (9, 3, 12, 4)]  # two tokens more with the template's
    said: list[str] = []
    kept = encode_prompts(rows, tokenizer, max_prompt_length=6, filter_overlong_prompts=True, say=said.append)
    assert [p.uid for p in kept] == ["3", "4"] and said == [
        "2 of 4 rows are longer than data.max_prompt_length=6 tokens and are left out; "
        "to keep them, set data.max_prompt_length=14"
    ]
    with pytest.raises(DataError, match=r"all 2 are longer .*=6 tokens; to keep them all, set .*=14"):
        encode_prompts([rows[2], rows[0]], tokenizer, max_prompt_length=6, filter_overlong_prompts=True)
    assert encode_prompts([], tokenizer, max_prompt_length=6, filter_overlong_prompts=True, say=said.append) == []
    assert len(encode_prompts(rows, tokenizer, say=said.append)) == 4 and len(said) == 1


def test_an_end_token_is_removed_only_where_it_closes_more_than_nothing() -> None:
    class Plain:
        chat_template = ""
        eos_token_id: int | None = 9

        def __init__(self, *ids: int) -> None:
            self.ids = list(ids)

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": self.ids}

    for ids, left in (((9,), (9,)), ((1, 9), (1,)), ((1, 9, 9), (1, 9)), ((9, 1), (9, 1))):
        assert encode_prompt(row("q"), Plain(*ids)).token_ids == left
    with pytest.raises(DataError, match="r: field 'prompt' has an empty prompt"):
        encode_prompt(row("q"), Plain())
    endless = Plain(1)
    endless.eos_token_id = None
    with pytest.raises(DataError, match="tokenizer: has no eos_token"):
        encode_answer("a", endless)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_rows_that_are_tokenized_together_are_as_each_alone(tokenizer, monkeypatch, template, fast):
    monkeypatch.setattr(chat_template, "BATCH", 3)
    if not template:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    rows = [dataclasses.replace(row(f"{i}+{10 ** (i % 4)}="), uid=f"r{i}", ground_truth=i) for i in range(8)]
    alone = [encode_prompt(one, tokenizer) for one in rows]
    calls = []

    class Counted:
        chat_template, eos_token_id, is_fast = tokenizer.chat_template, tokenizer.eos_token_id, fast
        apply_chat_template = tokenizer.apply_chat_template

        def __call__(self, texts, **options):
            calls.append(texts if isinstance(texts, str) else len(texts))
            return tokenizer(texts, **options)

    assert list(encode_rows(iter(rows), Counted())) == alone
    assert [prompt.uid for prompt in alone] == [f"r{i}" for i in range(8)]
    assert calls == [3, 3, 2] if fast else len(calls) == 8
    answers = ["1", "", "22"]
    assert encode_answers(answers, tokenizer) == [encode_answer(text, tokenizer) for text in answers]


def test_a_row_without_a_token_is_named_among_others(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    rows = [dataclasses.replace(row(text), uid=uid) for text, uid in (("1", "first"), ("", "second"), ("2", "third"))]
    with pytest.raises(DataError, match=r"second.*empty prompt"):
        list(encode_rows(rows, tokenizer))
