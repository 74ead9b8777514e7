"""Tool formats: what is read as a call, what is not, and where a call ends."""

from __future__ import annotations

from gspo.environments.formats import HERMES, PYTHON, TAG, closing_tokens, find_format
from gspo.environments.protocol import ToolCall


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
