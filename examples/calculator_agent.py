"""An agent that answers sums with a calculator. It knows the `openai` package and nothing of gspo.

    gspo train calculator environment.agent=examples/calculator_agent.py environment.name=null \\
        actor_rollout_ref.rollout.multi_turn.format=tag
"""

import ast
import json
import operator

from openai import AsyncOpenAI, BadRequestError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


async def run(data, base_url, http_client, api_key):
    """One rollout. It returns nothing: the reward function of the run grades the last answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = list(data["messages"])
    while True:
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        except BadRequestError:  # no room for another turn
            return
        message = answer.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})


def calculate(arguments):
    """The result of a call, or what was wrong with it, as the model sees it."""
    try:
        return str(value_of(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def value_of(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("expected whole numbers with +, - and *")
