"""Tool formats: what is read as a call, what is not, and where a call ends."""

from __future__ import annotations

import pytest

from gspo.environments.formats import HERMES, PYTHON, TAG, closing_tokens, find_format
from gspo.environments.protocol import EnvironmentProblem, ToolCall


def test_hermes_reads_several_calls_and_names_what_is_wrong() -> None:
    text = (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>\n'
        '<tool_call>{"name": "open", "arguments": "{\\"n\\": 2}"}</tool_call><tool_call>{"name": </tool_call>'
        '<tool_call>["open"]</tool_call><tool_call>{"name": "wait", "arguments": 3}'
    )
    calls = HERMES.parse(text)
    assert calls[:2] == (ToolCall("look", {"at": "door"}), ToolCall("open", {"n": 2}))
    assert "not valid JSON" in (calls[2].error or "") and "JSON object" in (calls[3].error or "")
    assert calls[4].name == "wait" and "must be a JSON object" in (calls[4].error or "")
    assert HERMES.parse("no call") == () and not HERMES.inline
    named_otherwise = '<tool_call>{"name": "look", "parameters": {"at": "door"}}</tool_call><tool_call>{"name": "wait"}'
    assert HERMES.parse(named_otherwise) == (ToolCall("look", {"at": "door"}), ToolCall("wait", {}))


def test_a_call_that_is_nested_too_deeply_is_a_call_with_an_error() -> None:
    """A model may write thousands of brackets, which can neither be read nor be sent to a worker."""

    def errors(depth: int) -> list[str | None]:
        nested = "[" * depth + "]" * depth
        texts = (f'{{"at": {nested}}}', f'"{{\\"at\\": {nested}}}"')  # an object, and one as text
        return [HERMES.parse(f'<tool_call>{{"name": "look", "arguments": {text}}}')[0].error for text in texts]

    assert errors(62) == [None, None]
    assert errors(63) == ["the tool call is not valid JSON: it is nested deeper than 64 levels", None]
    assert None not in errors(64) and None not in errors(100_000)
    assert "not valid JSON" in (HERMES.parse("<tool_call>" + "[" * 100_000)[0].error or "")


def test_python_blocks_end_at_their_fence() -> None:
    text = "First:\n```python\nprint(1)\n```\nand then"
    assert PYTHON.parse(text) == (ToolCall("python", {"input": "print(1)"}),)
    assert text[: PYTHON.call_end(text)].endswith("```") and PYTHON.call_end("```python\nprint(1)\n") is None
    assert PYTHON.call_end("a `word` and ```text\nno```") is None
    assert PYTHON.observe([{"role": "tool", "content": "1"}]) == "\n```output\n1\n```\n"


def test_tags() -> None:
    assert TAG.parse("a<tool>1+1</tool>b") == (ToolCall("", {"input": "1+1"}),)
    assert TAG.call_end("a<tool>1+1</tool>b") == 17 and TAG.call_end("<tool>1+1") is None
    assert TAG.observe([{"role": "tool", "content": "2"}]) == "<result>2</result>"


def test_the_tokens_that_can_end_a_closing_text() -> None:
    words = ["a", ">", ">\n", "tool", "tool>", " >", "</tool>", "x</tool>y", "", "ol>x", "l"]
    assert [words[i] for i in closing_tokens("</tool>", words)] == [">", ">\n", "tool>", "</tool>", "x</tool>y", "ol>x"]


def test_auto_is_the_tokenizers_own_where_it_has_one() -> None:
    class Plain: ...

    class Own:
        response_template = "{}"

        def parse_response(self, text):
            if "bad" in text:
                raise ValueError("no end")
            return {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": text}}}]}

    assert find_format("auto", Plain()) is HERMES
    own = find_format("auto", Own())
    assert own.name == "tokenizer" and own.parse("door") == (ToolCall("look", {"at": "door"}),)
    assert "no end" in (own.parse("bad")[0].error or "")


def test_the_text_before_a_call_is_the_content() -> None:
    assert HERMES.content('I look. \n<tool_call>{"name": "f"}</tool_call> later') == "I look."
    assert HERMES.content("no call \n") == "no call \n"
    assert PYTHON.content("so \n```python\n1\n```") == "so \n" and TAG.content("a <tool>1</tool>b") == "a "


def test_an_inline_call_is_written_as_it_is_read() -> None:
    for found, name in ((PYTHON, "python"), (TAG, "")):
        assert found.parse("so " + found.write({"arguments": {"code": "1+1"}})) == (ToolCall(name, {"input": "1+1"}),)
        assert found.call_end(found.write({"arguments": {}})) is not None
    assert PYTHON.write({"arguments": {"code": "x"}}) == "```python\nx\n```"
    assert TAG.observe([{"content": 1}, {"content": "b"}]) == "<result>1\nb</result>"


def test_a_python_block_may_be_named_py_and_only_the_first_counts() -> None:
    text = "```py\na\n```\n```python\nb```"
    assert PYTHON.parse(text) == (ToolCall("python", {"input": "a"}),) and PYTHON.call_end(text) == 11
    assert PYTHON.parse(text[12:]) == (ToolCall("python", {"input": "b"}),)


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "f", "arguments": {}, "parameters": {"a": 1}}', ToolCall("f", {})),
        ('{"name": 3}', ToolCall("", error='the tool call must be a JSON object with "name" and "arguments"')),
        ('{"name": "f", "arguments": "no"}', ToolCall("f", error="the arguments of the tool call are not valid JSON")),
        (
            '{"name": "f", "arguments": "[1]"}',
            ToolCall("f", error="the arguments of the tool call must be a JSON object"),
        ),
    ],
)
def test_calls_that_cannot_be_read_say_why(body: str, call: ToolCall) -> None:
    assert HERMES.parse(f"<tool_call>{body}</tool_call>") == (call,)


def test_a_format_is_found_by_its_name() -> None:
    class Own:
        response_schema = "{}"

        def parse_response(self, text):
            return {"content": None, "tool_calls": [{"name": "f", "arguments": "{}"}] if text else None}

    assert [find_format(name, None).name for name in ("hermes", "python", "tag", "auto")] == [
        "hermes",
        "python",
        "tag",
        "hermes",
    ]
    own = find_format("tokenizer", Own())
    assert own.parse("x") == (ToolCall("f", {}),) and own.parse("") == () and own.content("x") == ""
    assert find_format("hermes", Own()) is HERMES and not own.inline
    with pytest.raises(EnvironmentProblem, match=r"format=tokenizer: .* choose hermes, python, tag"):
        find_format("tokenizer", None)
