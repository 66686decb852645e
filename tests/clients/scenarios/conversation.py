"""Define what every client is made to say and reports; nothing here knows of Pawl.

Two worked examples let a model of 135M parameters call the tool and answer by itself. The
client's name is said in each conversation, so that no two clients hold the same one.
"""

import json
from collections.abc import Callable
from typing import Any

MODEL = "calculator"
MAX_TOKENS = 16
SYSTEM = "You help users of {client}. Use the weather tool."
EXAMPLES = (("call_0", "Paris", "rain"), ("call_1", "Oslo", "snow"))
ASKED = "What is the weather in {city}?"
ANSWER = "{city}: {weather}."
QUESTION = ASKED.format(city="Lima")
TURNS = ("Hello, I use {client}.", "And what did I just tell you?")
TOOL_DESCRIPTION = "The weather in a city."
FUNCTION = {
    "name": "weather",
    "description": TOOL_DESCRIPTION,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}

ran: list[str] = []


def weather(city: str) -> str:
    """Return the weather in a city."""
    ran.append(city)
    return "sunny"


def chat_history(client: str) -> list[Any]:
    """Return the worked examples and the question, as messages of OpenAI's chat API."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM.format(client=client)}]
    for call_id, city, found in EXAMPLES:
        function = {"name": "weather", "arguments": json.dumps({"city": city})}
        messages += [
            {"role": "user", "content": ASKED.format(city=city)},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": found},
            {"role": "assistant", "content": ANSWER.format(city=city, weather=found)},
        ]
    return [*messages, {"role": "user", "content": QUESTION}]


def responses_history() -> list[Any]:
    """Return the worked examples and the question, as items of OpenAI's Responses API."""
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


def chat(client: str, complete: Callable[..., Any]) -> None:
    """Hold both conversations by a function that makes chat completions, and report them."""
    messages = chat_history(client)
    message = complete(messages=messages, tools=[CHAT_TOOL]).choices[0].message
    while message.tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        message = complete(messages=messages, tools=[CHAT_TOOL]).choices[0].message
    answer, messages, seen = message.content or "", [], []
    for turn in turns(client):
        messages.append({"role": "user", "content": turn})
        chunks = complete(messages=messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        messages.append({"role": "assistant", "content": "".join(pieces)})
        seen.append(pieces)
    report(answer, seen)


def turns(client: str) -> list[str]:
    """Return what the user says in the streamed conversation."""
    return [turn.format(client=client) for turn in TURNS]


def report(answer: str, streamed: list[list[str]]) -> None:
    """Print what was seen: the answer after the tool ran, and the pieces of each streamed turn."""
    print(json.dumps({"ran": ran, "answer": answer, "streamed": streamed}))
