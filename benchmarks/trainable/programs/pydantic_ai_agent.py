"""Run pydantic-ai: its agent, with a tool and a structured output."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings
from task import EXAMPLES, INSTRUCTIONS, MODEL, TOKENS, ask_all, calculator


class Answer(BaseModel):
    """Answer a question."""

    value: int


def examples() -> list[ModelMessage]:
    told: list[ModelMessage] = []
    for asked, answered in EXAMPLES:
        told.append(ModelRequest(parts=[UserPromptPart(asked)]))
        told.append(ModelResponse(parts=[TextPart(answered)]))
    return told


async def main() -> None:
    agent = Agent(
        OpenAIChatModel(MODEL),
        output_type=Answer,
        tools=[calculator],
        instructions=INSTRUCTIONS,
        model_settings=ModelSettings(max_tokens=TOKENS),
    )
    await ask_all(lambda question: agent.run(question, message_history=examples()))


asyncio.run(main())
