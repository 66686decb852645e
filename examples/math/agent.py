"""Solve arithmetic problems with AutoGen: an assistant that has a calculator.

As a program, it reads one problem as a line of JSON ({"question": "..."}), and prints the answer.
The model server is the one in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken, FunctionCall
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

SYSTEM = "Solve the math problem with the calculator tool."
# More than an episode has: dropping the oldest messages would drop the examples first.
MOST_MESSAGES = 40
# AutoGen needs the abilities of a model that it does not know.
MODEL_INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    family=ModelFamily.UNKNOWN,
    structured_output=False,
)
# Worked examples, shown to the model as real earlier turns: problem, expression, result.
EXAMPLES = (
    ("What is 23 * 47?", "23 * 47", "1081"),
    ("A box holds 24 pens. How many pens are in 13 boxes?", "24 * 13", "312"),
    ("Tom has 85 coins and spends 27. How many are left?", "85 - 27", "58"),
    ("What is 65 + 12 * 8?", "65 + 12 * 8", "161"),
)
OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: str) -> str:
    """Work out an expression of numbers, + - * / and parentheses."""
    if len(expression) > 100:
        raise ValueError("the expression is too long")
    value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else f"{value:.4f}"


def evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](evaluate(left), evaluate(right))
    raise ValueError("only numbers, + - * / and parentheses are read")


def worked_examples() -> list[LLMMessage]:
    messages: list[LLMMessage] = []
    for number, (problem, expression, result) in enumerate(EXAMPLES):
        call = FunctionCall(
            id=f"call_{number}",
            name="calculator",
            arguments=json.dumps({"expression": expression}),
        )
        done = FunctionExecutionResult(
            content=result, name="calculator", call_id=call.id, is_error=False
        )
        messages += [
            UserMessage(content=problem, source="user"),
            AssistantMessage(content=[call], source="solver"),
            FunctionExecutionResultMessage(content=[done]),
            AssistantMessage(content=f"The answer is {result}.", source="solver"),
        ]
    return messages


def solver(client: OpenAIChatCompletionClient) -> AssistantAgent:
    return AssistantAgent(
        "solver",
        client,
        tools=[FunctionTool(calculator, description="Works out an expression.")],
        model_context=BufferedChatCompletionContext(
            buffer_size=MOST_MESSAGES, initial_messages=worked_examples()
        ),
        system_message=SYSTEM,
        reflect_on_tool_use=True,
    )


async def answer(
    task: dict[str, Any], base_url: str | None = None, model: str | None = None
) -> str:
    """Return the assistant's answer to one problem."""
    client = OpenAIChatCompletionClient(
        model=model or os.environ.get("OPENAI_MODEL", "math"),
        model_info=MODEL_INFO,
        base_url=base_url or os.environ["OPENAI_BASE_URL"],
        temperature=1.0,
        max_tokens=64,
    )
    try:
        reply = await solver(client).run(
            task=task["question"], cancellation_token=CancellationToken()
        )
    finally:
        await client.close()
    return str(reply.messages[-1].content)  # type: ignore[union-attr]


if __name__ == "__main__":
    print(asyncio.run(answer(json.loads(sys.stdin.readline()))))
