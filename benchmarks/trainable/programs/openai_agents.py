"""Run OpenAI's Agents SDK: `chat`, `responses` or `streamed`, `loose` for tools not strict.

Its own defaults are responses and strict tools.
"""

import asyncio
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api
from task import INSTRUCTIONS, MODEL, TOKENS, ask_all, calculator, messages, search

MOST_TURNS = 2


async def main(api: str, *, strict: bool) -> None:
    if api == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(
        name="helper",
        model=MODEL,
        instructions=INSTRUCTIONS,
        tools=[function_tool(tool, strict_mode=strict) for tool in (calculator, search)],
        model_settings=ModelSettings(max_tokens=TOKENS),
    )

    async def ask(question: str) -> None:
        told = messages(question)
        if api == "streamed":
            run = Runner.run_streamed(agent, told, max_turns=MOST_TURNS)
            async for _ in run.stream_events():
                pass
        else:
            await Runner.run(agent, told, max_turns=MOST_TURNS)

    await ask_all(ask)


asyncio.run(main(sys.argv[2], strict="loose" not in sys.argv[3:]))
