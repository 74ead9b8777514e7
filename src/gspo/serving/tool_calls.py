"""Tool calls in the text of a reply, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.environments.formats import ToolFormat
from gspo.environments.protocol import ToolCall


def split_calls(
    text: str, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]]
) -> tuple[str | None, list[dict[str, Any]]]:
    """The text before the first tool call, and the calls. A call that cannot be read stays text."""
    calls = tool_format.parse(text)
    if not calls or any(call.error for call in calls):
        return text, []
    content = tool_format.content(text)
    return content or None, [_in_openai_form(call, tools) for call in calls]


def _in_openai_form(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A call with an id. A format whose calls have no name or one text calls the first tool with its first argument."""
    name = call.name or next((tool["function"]["name"] for tool in tools), "")
    arguments = dict(call.arguments)
    schema = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    parameters = schema.get("parameters")
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else {}
    if set(arguments) == {"input"} and properties and "input" not in properties:
        arguments = {next(iter(properties)): arguments["input"]}
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
