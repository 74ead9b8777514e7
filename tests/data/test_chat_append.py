"""A conversation that was only ever appended to has the tokens of the whole chat, on the templates of known models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.data.chat_append import ChatAppender, append_problem, require_append
from gspo.data.rows import DataError
from gspo.models.load import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {
    "qwen2.5": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma3": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "smollm2": ["<|im_start|>", "<|im_end|>"],
}
END = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "gemma3": "<end_of_turn>"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]


def tokenizer_of(name: str) -> Any:
    tokenizer = load_tokenizer("embedded")
    if name != "embedded":
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text().rstrip("\n")
    return tokenizer


def five_turns(name: str, role: str, **options: Any) -> tuple[Any, tuple[int, ...], list[dict[str, Any]]]:
    """The tokens of five turns, appended one after another, and the chat that they are."""
    tokenizer = tokenizer_of(name)
    chat = ChatAppender(tokenizer, **options)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
    tokens = chat.opened(messages)
    end = tokenizer.convert_tokens_to_ids(END.get(name, "<|im_end|>" if name == "smollm2" else "<eos>"))
    for turn in range(5):
        answer = f"I try {turn}: é\n  and  more"
        seen = [{"role": role, "content": f"It is {turn}.\n\tok"}]
        seen *= 2 if role == "tool" and turn == 2 else 1
        tokens += (*chat.encode(answer), end)
        tokens += chat.appended(seen, end)
        messages += [{"role": "assistant", "content": answer}, *seen]
    return tokenizer, tokens, messages


@pytest.mark.parametrize(
    ("name", "role", "options"),
    [
        ("qwen2.5", "tool", {"tools": TOOLS}),
        ("qwen2.5", "user", {}),
        ("qwen3", "tool", {"tools": TOOLS}),
        ("qwen3", "user", {"enable_thinking": True}),
        ("llama3", "tool", {"tools": TOOLS}),
        ("llama3", "user", {}),
        ("gemma3", "user", {}),
        ("smollm2", "tool", {}),
        ("smollm2", "user", {}),
        ("embedded", "user", {}),
    ],
)
def test_five_turns_have_the_tokens_of_the_whole_chat(name: str, role: str, options: dict[str, Any]) -> None:
    tokenizer, tokens, messages = five_turns(name, role, **options)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert tokens == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert append_problem(tokenizer, role, **options) is None


def test_the_end_of_a_turn_is_added_when_the_model_did_not_write_it() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    chat = ChatAppender(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    seen = [{"role": "user", "content": "ok"}]
    cut = chat.appended(seen, chat.encode("a")[0])
    assert cut == (end, *chat.appended(seen, end)) and chat.turn_end(seen) == end


@pytest.mark.parametrize(
    ("name", "role", "options", "why"),
    [
        ("gemma3", "tool", {}, "refuses messages of the role 'tool'"),
        ("embedded", "tool", {}, "refuses messages of the role 'tool'"),
        ("qwen3", "user", {"enable_thinking": False}, "after 1 turns"),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused_by_name(
    name: str, role: str, options: dict[str, Any], why: str
) -> None:
    tokenizer = tokenizer_of(name)
    tokenizer.name_or_path = f"models/{name}"
    with pytest.raises(DataError, match=f"^models/{name}: has a chat template that cannot be appended to.*{why}"):
        require_append(tokenizer, role, **options)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + (m['content'] if loop.revindex <= 2 else '…') }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert "rendered whole" in (append_problem(tokenizer, "user") or "")


def test_without_a_template_contents_are_joined_by_lines() -> None:
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = None
    chat = ChatAppender(tokenizer)
    assert tokenizer.decode(chat.opened([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])) == "a\nb"
    assert tokenizer.decode(chat.appended([{"role": "tool", "content": "c"}], 9)) == "\nc\n"
    assert append_problem(tokenizer, "tool") is None


def test_options_without_a_value_do_not_reach_the_template() -> None:
    class Noting:
        chat_template = "template"
        seen: dict[str, Any] = {}

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            self.seen = options
            return "x"

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1]}

    tokenizer = Noting()
    assert ChatAppender(tokenizer, tools=None, thinking=False).opened([{"role": "user", "content": "a"}]) == (1,)
    assert tokenizer.seen == {"add_generation_prompt": True, "thinking": False, "tokenize": False}
