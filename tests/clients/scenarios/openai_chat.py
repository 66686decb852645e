"""Run openai-python's chat completions."""

import json
from typing import Any

from conversation import (
    MAX_TOKENS,
    MODEL,
    TOOL_DESCRIPTION,
    chat_history,
    report,
    turns,
    weather,
)
from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": TOOL_DESCRIPTION,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def use_tool(client: OpenAI) -> str:
    messages: Any = chat_history("openai")
    while True:
        completion = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], max_tokens=MAX_TOKENS, temperature=0
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def stream(client: OpenAI) -> list[list[str]]:
    messages: Any = []
    seen = []
    for turn in turns("openai"):
        messages.append({"role": "user", "content": turn})
        chunks = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        messages.append({"role": "assistant", "content": "".join(pieces)})
        seen.append(pieces)
    return seen


with OpenAI() as openai:
    report(use_tool(openai), stream(openai))
