"""Run pydantic-ai: its agent, whole and streamed."""

import asyncio

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
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings

NAME = "pydantic-ai"
SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


def history() -> list[ModelMessage]:
    messages: list[ModelMessage] = [
        ModelRequest(parts=[SystemPromptPart(SYSTEM.format(client=NAME))])
    ]
    for call_id, city, found in EXAMPLES:
        messages += [
            ModelRequest(parts=[UserPromptPart(ASKED.format(city=city))]),
            ModelResponse(parts=[ToolCallPart("weather", {"city": city}, call_id)]),
            ModelRequest(parts=[ToolReturnPart("weather", found, call_id)]),
            ModelResponse(parts=[TextPart(ANSWER.format(city=city, weather=found))]),
        ]
    return messages


async def use_tool(model: OpenAIChatModel) -> str:
    agent = Agent(model, tools=[weather], model_settings=SETTINGS)
    return (await agent.run(QUESTION, message_history=history())).output


async def stream(model: OpenAIChatModel) -> list[list[str]]:
    agent = Agent(model, model_settings=SETTINGS)
    messages: list[ModelMessage] = []
    seen = []
    for turn in turns(NAME):
        async with agent.run_stream(turn, message_history=messages) as result:
            seen.append([piece async for piece in result.stream_text(delta=True)])
            messages = result.all_messages()
    return seen


async def main() -> None:
    model = OpenAIChatModel(MODEL)
    report(await use_tool(model), await stream(model))


asyncio.run(main())
