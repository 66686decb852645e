"""Run openai-python's Responses API."""

import json
from typing import Any

from conversation import (
    ANSWER,
    ASKED,
    EXAMPLES,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SYSTEM,
    TOOL_DESCRIPTION,
    report,
    turns,
    weather,
)
from openai import OpenAI

NAME = "openai responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": TOOL_DESCRIPTION,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def history() -> list[Any]:
    items: list[Any] = []
    for call_id, city, found in EXAMPLES:
        call = {"call_id": call_id, "name": "weather", "arguments": json.dumps({"city": city})}
        items += [
            {"role": "user", "content": ASKED.format(city=city)},
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": call_id, "output": found},
            {"role": "assistant", "content": ANSWER.format(city=city, weather=found)},
        ]
    return [*items, {"role": "user", "content": QUESTION}]


def use_tool(client: OpenAI) -> str:
    items = history()
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
