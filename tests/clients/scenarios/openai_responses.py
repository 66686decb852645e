"""Run openai-python's Responses API."""

import json
from typing import Any

from conversation import (
    FUNCTION,
    MAX_TOKENS,
    MODEL,
    SYSTEM,
    report,
    responses_history,
    turns,
    weather,
)
from openai import OpenAI

NAME = "openai responses"
TOOL: Any = {"type": "function", **FUNCTION, "strict": False}


def use_tool(client: OpenAI) -> str:
    items = responses_history()
    while True:
        response = client.responses.create(
            model=MODEL,
            instructions=SYSTEM.format(client=NAME),
            input=items,
            tools=[TOOL],
            max_output_tokens=MAX_TOKENS,
            temperature=0,
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [item.model_dump(exclude_unset=True) for item in response.output]
        for call in calls:
            result = weather(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


def stream(client: OpenAI) -> list[list[str]]:
    items: list[Any] = []
    seen = []
    for turn in turns(NAME):
        items.append({"role": "user", "content": turn})
        with client.responses.stream(
            model=MODEL, input=items, max_output_tokens=MAX_TOKENS, temperature=0
        ) as events:
            pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
            final = events.get_final_response()
        items += [item.model_dump(exclude_unset=True) for item in final.output]
        seen.append(pieces)
    return seen


with OpenAI() as openai:
    report(use_tool(openai), stream(openai))
