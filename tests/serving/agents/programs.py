"""Agents as users write them: they know the openai package and nothing of gspo."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


async def guess(data: Any, base_url: str, http_client: Any, api_key: str) -> dict[str, float]:
    """The built-in environment `guess`, as an agent: six guesses, a reward for each answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages, number, rewards = list(data["messages"]), int(data["ground_truth"]), {}
    for _ in range(6):
        try:
            answer = await client.chat.completions.create(model="any", messages=messages)
        except openai.BadRequestError:  # no room for another turn
            break
        text = answer.choices[0].message.content or ""
        found = re.findall(r"\d+", text)
        guessed = int(found[-1][:9]) if found else None
        rewards[answer.id] = float(guessed == number) - 0.05
        if guessed == number or answer.choices[0].finish_reason == "length":
            break
        hint = "no number" if guessed is None else "higher" if guessed < number else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return rewards


async def notes_ends(data: Any, base_url: str, http_client: Any, api_key: str) -> dict[str, float]:
    """Two short answers in conversations of their own; each earns 1 where it was cut at its limit."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    rewards = {}
    for text, limit in (("1+1=", 2), ("2+2=", 60)):
        messages: Any = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=limit)
        rewards[answer.id] = float(answer.choices[0].finish_reason == "length")
    return rewards


def calculate(data: Any, base_url: str, api_key: str) -> None:
    """The built-in environment `calculator`, as a plain function; the run's reward function grades the answer."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(data["messages"])
    while True:
        try:
            answer = client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
        except openai.BadRequestError:  # no room for another turn
            return
        message = answer.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = compute(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def compute(expression: str) -> str:
    """What the built-in calculator answers."""
    from gspo.environments.builtin import calculator
    from gspo.environments.tools import ToolError

    try:
        return calculator(expression)
    except ToolError as error:
        return f"error: {error}"


async def two_conversations(data: Any, base_url: str, api_key: str) -> float:
    """A draft and, in a conversation of its own, a check of it; then the first one goes on."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask = client.chat.completions.create
    messages = list(data["messages"])
    draft = (await ask(model="m", messages=messages, max_tokens=8)).choices[0].message.content or ""
    await ask(model="m", messages=[{"role": "user", "content": f"check {draft}"}], max_tokens=4)
    messages += [{"role": "assistant", "content": draft}, {"role": "user", "content": "again"}]
    await ask(model="m", messages=messages, max_tokens=6)
    return 0.5


async def goes_back(data: Any, base_url: str, api_key: str) -> float:
    """A draft, and two replies to it, of which the second one goes back to the draft."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask = client.chat.completions.create
    messages = list(data["messages"])
    draft = (await ask(model="m", messages=messages, max_tokens=8)).choices[0].message.content or ""
    for reply in ("again", "instead"):
        followed = [*messages, {"role": "assistant", "content": draft}, {"role": "user", "content": reply}]
        await ask(model="m", messages=followed, max_tokens=6)
    return 0.5


async def by_text(data: Any, base_url: str, api_key: str) -> float:
    """Completions of a text that grows, with a stop text that the agent puts back itself."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    text = data["messages"][0]["content"]
    for _ in range(3):
        choice = (await client.completions.create(model="m", prompt=text, max_tokens=20, stop=["="])).choices[0]
        text += choice.text + ("=" if choice.finish_reason == "stop" else "") + "7;"
    return 1.0


async def raises(data: Any, base_url: str, api_key: str) -> float:
    raise RuntimeError("a defect of the agent")


async def says_nothing(data: Any, base_url: str, api_key: str) -> float:
    return 1.0


async def sleeps(data: Any, base_url: str, api_key: str) -> float:
    await asyncio.sleep(3600)
    return 1.0
