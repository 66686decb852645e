"""Define what every client is made to say and reports; nothing here knows of Pawl.

Two worked examples let a model of 135M parameters call the tool and answer by itself. The
client's name is said in each conversation, so that no two clients hold the same one.
"""

import json

MODEL = "calculator"
MAX_TOKENS = 24
SYSTEM = "You help users of {client}. Use the weather tool."
EXAMPLES = (("call_0", "Paris", "rain"), ("call_1", "Oslo", "snow"))
ASKED = "What is the weather in {city}?"
ANSWER = "{city}: {weather}."
QUESTION = ASKED.format(city="Lima")
TURNS = ("Hello, I use {client}.", "And what did I just tell you?")
TOOL_DESCRIPTION = "The weather in a city."

ran: list[str] = []


def weather(city: str) -> str:
    """Return the weather in a city."""
    ran.append(city)
    return "sunny"


def chat_history(client: str) -> list[dict[str, object]]:
    """Return the worked examples and the question, as messages of OpenAI's chat API."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": SYSTEM.format(client=client)}
    ]
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


def turns(client: str) -> list[str]:
    """Return what the user says in the streamed conversation."""
    return [turn.format(client=client) for turn in TURNS]


def report(answer: str, streamed: list[list[str]]) -> None:
    """Print what was seen: the answer after the tool ran, and the pieces of each streamed turn."""
    print(json.dumps({"ran": ran, "answer": answer, "streamed": streamed}))
