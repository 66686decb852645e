"""Run anthropic-sdk-python: its tool runner, and its stream helper."""

from typing import Any

from anthropic import Anthropic, beta_tool
from conversation import (
    ANSWER,
    ASKED,
    EXAMPLES,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SYSTEM,
    report,
    turns,
    weather,
)

# The SDK no longer has a parameter for it.
GREEDY = {"temperature": 0}


def history() -> list[Any]:
    messages: list[Any] = []
    for call_id, city, found in EXAMPLES:
        use = {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": found}
        messages += [
            {"role": "user", "content": ASKED.format(city=city)},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": ANSWER.format(city=city, weather=found)},
        ]
    return [*messages, {"role": "user", "content": QUESTION}]


def use_tool(client: Anthropic) -> str:
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        system=SYSTEM.format(client="anthropic"),
        messages=history(),
        tools=[beta_tool(weather)],
        max_tokens=MAX_TOKENS,
        extra_body=GREEDY,
    )
    last = runner.until_done()
    return "".join(block.text for block in last.content if block.type == "text")


def stream(client: Anthropic) -> list[list[str]]:
    messages: list[Any] = []
    seen = []
    for turn in turns("anthropic"):
        messages.append({"role": "user", "content": turn})
        with client.messages.stream(
            model=MODEL, messages=messages, max_tokens=MAX_TOKENS, extra_body=GREEDY
        ) as events:
            seen.append(list(events.text_stream))
            final = events.get_final_message()
        messages.append({"role": "assistant", "content": final.content})
    return seen


with Anthropic() as anthropic:
    report(use_tool(anthropic), stream(anthropic))
