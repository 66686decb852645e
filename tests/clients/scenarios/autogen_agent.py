"""Run AutoGen: its assistant agent, whole and streamed."""

import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, TextMessage
from autogen_core import FunctionCall
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from conversation import (
    ANSWER,
    ASKED,
    EXAMPLES,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SYSTEM,
    TOOL_DESCRIPTION,
    report,
    turns,
    weather,
)

NAME = "AutoGen"
# AutoGen wants to know what a model can do whose name it does not know.
INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    family=ModelFamily.UNKNOWN,
    structured_output=False,
)


def history() -> list[LLMMessage]:
    messages: list[LLMMessage] = []
    for call_id, city, found in EXAMPLES:
        call = FunctionCall(id=call_id, name="weather", arguments=json.dumps({"city": city}))
        result = FunctionExecutionResult(
            call_id=call_id, name="weather", content=found, is_error=False
        )
        messages += [
            UserMessage(content=ASKED.format(city=city), source="user"),
            AssistantMessage(content=[call], source="helper"),
            FunctionExecutionResultMessage(content=[result]),
            AssistantMessage(content=ANSWER.format(city=city, weather=found), source="helper"),
        ]
    return messages


async def use_tool(client: OpenAIChatCompletionClient) -> str:
    agent = AssistantAgent(
        "helper",
        client,
        tools=[FunctionTool(weather, description=TOOL_DESCRIPTION)],
        model_context=UnboundedChatCompletionContext(initial_messages=history()),
        system_message=SYSTEM.format(client=NAME),
        reflect_on_tool_use=True,
    )
    last = (await agent.run(task=QUESTION)).messages[-1]
    assert isinstance(last, TextMessage)
    return last.content


async def stream(client: OpenAIChatCompletionClient) -> list[list[str]]:
    agent = AssistantAgent("talker", client, system_message=None, model_client_stream=True)
    seen = []
    for turn in turns(NAME):
        pieces = []
        async for event in agent.run_stream(task=turn):
            assert not isinstance(event, TaskResult) or event.messages
            if isinstance(event, ModelClientStreamingChunkEvent):
                pieces.append(event.content)
        seen.append(pieces)
    return seen


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL, model_info=INFO, temperature=0, max_tokens=MAX_TOKENS
    )
    report(await use_tool(client), await stream(client))
    await client.close()


asyncio.run(main())
