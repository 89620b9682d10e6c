"""An agent on the unmodified `openai` package: a calculator as its tool, and its own reward.

    python -m megatron_stare train tool_use_quickstart tools.environment= \
        agents.function=examples.openai_agent.run scoring.reward=episode

It knows nothing of the trainer: `endpoint` is the address and the key of any OpenAI-compatible
server. docs/agents.md explains what is trained.
"""

import ast
import json
import operator

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TURNS = 3
# One for all episodes: to load the certificates takes longer than an episode.
HTTP = DefaultAsyncHttpxClient()
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression of integers with + - *.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def evaluate(node):
    """The value of a parsed expression; ValueError for anything but integers and + - *."""
    if isinstance(node, ast.Expression):
        return evaluate(node.body)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("only integers and + - *")


def calculator(arguments):
    """The text for the model; also after a wrong call."""
    try:
        return str(evaluate(ast.parse(json.loads(arguments)["expression"], mode="eval")))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        return f"Error: {type(error).__name__}"


async def run(row, endpoint):
    """1 if the model's boxed answer is the label, else 0."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=HTTP)
    messages = list(row.messages)
    for _ in range(TURNS):
        completion = await client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=[CALCULATOR]
        )
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        messages += [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": calculator(call.function.arguments),
            }
            for call in answer.tool_calls
        ]
    right = f"\\boxed{{{row.label}}}" in (answer.content or "")
    return {"reward": float(right), "metrics": {"turns": len(messages) // 2}}
