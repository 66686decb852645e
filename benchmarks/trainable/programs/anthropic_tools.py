"""Run anthropic-sdk-python: its tool runner, `whole` or `streamed`."""

import asyncio
import sys

import task
from anthropic import AsyncAnthropic, beta_async_tool

MOST_TURNS = 2


@beta_async_tool
async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + and *.
    """
    return task.calculator(expression)


@beta_async_tool
async def search(query: str) -> str:
    """Search an encyclopedia.

    Args:
        query: what is looked for.
    """
    return task.search(query)


async def main(*, streamed: bool) -> None:
    async with AsyncAnthropic() as client:

        async def ask(question: str) -> None:
            runner = client.beta.messages.tool_runner(
                model=task.MODEL,
                max_tokens=task.TOKENS,
                system=task.INSTRUCTIONS,
                messages=task.messages(question),
                tools=[calculator, search],
                max_iterations=MOST_TURNS,
                stream=streamed,
            )
            async for reply in runner:
                if streamed:
                    await reply.get_final_message()

        await task.ask_all(ask)


asyncio.run(main(streamed=sys.argv[2] == "streamed"))
