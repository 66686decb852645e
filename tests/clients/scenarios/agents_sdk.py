"""Run OpenAI's Agents SDK: its runner, its sessions."""

import asyncio
import json
from typing import Any

from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
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

NAME = "the Agents SDK"
SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


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


async def use_tool() -> str:
    agent = Agent(
        name="helper",
        model=MODEL,
        instructions=SYSTEM.format(client=NAME),
        tools=[function_tool(weather)],
        model_settings=SETTINGS,
    )
    return str((await Runner.run(agent, history())).final_output)


async def stream() -> list[list[str]]:
    agent = Agent(name="talker", model=MODEL, model_settings=SETTINGS)
    session = SQLiteSession("talk")
    seen = []
    for turn in turns(NAME):
        result = Runner.run_streamed(agent, turn, session=session)
        raw = [e.data async for e in result.stream_events() if e.type == "raw_response_event"]
        seen.append([data.delta for data in raw if data.type == "response.output_text.delta"])
    return seen


async def main() -> None:
    report(await use_tool(), await stream())


asyncio.run(main())
