"""Run litellm's completion()."""

import json
from typing import Any

import litellm
from conversation import MAX_TOKENS, MODEL, TOOL_DESCRIPTION, chat_history, report, turns, weather

NAME = "litellm"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": TOOL_DESCRIPTION,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SETTINGS: Any = {"model": f"openai/{MODEL}", "max_tokens": MAX_TOKENS, "temperature": 0}


def use_tool() -> str:
    messages: list[Any] = chat_history(NAME)
    while True:
        reply: Any = litellm.completion(messages=messages, tools=[TOOL], **SETTINGS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def stream() -> list[list[str]]:
    messages: list[Any] = []
    seen = []
    for turn in turns(NAME):
        messages.append({"role": "user", "content": turn})
        chunks: Any = litellm.completion(messages=messages, stream=True, **SETTINGS)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        messages.append({"role": "assistant", "content": "".join(pieces)})
        seen.append(pieces)
    return seen


report(use_tool(), stream())
