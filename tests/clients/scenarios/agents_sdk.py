"""Run OpenAI's Agents SDK: its runner, its sessions."""

import asyncio

from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
from conversation import (
    MAX_TOKENS,
    MODEL,
    SYSTEM,
    report,
    responses_history,
    turns,
    weather,
)

NAME = "the Agents SDK"
SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


async def use_tool() -> str:
    agent = Agent(
        name="helper",
        model=MODEL,
        instructions=SYSTEM.format(client=NAME),
        tools=[function_tool(weather)],
        model_settings=SETTINGS,
    )
    return str((await Runner.run(agent, responses_history())).final_output)


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
