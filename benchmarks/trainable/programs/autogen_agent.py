"""Run AutoGen: its assistant agent, which reflects on what its tools said."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, LLMMessage, ModelFamily, ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from task import EXAMPLES, INSTRUCTIONS, MODEL, TOKENS, ask_all, calculator, search

# AutoGen wants to know what a model can do whose name it does not know.
INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    family=ModelFamily.UNKNOWN,
    structured_output=False,
)


def examples() -> list[LLMMessage]:
    told: list[LLMMessage] = []
    for asked, answered in EXAMPLES:
        told.append(UserMessage(content=asked, source="user"))
        told.append(AssistantMessage(content=answered, source="helper"))
    return told


async def main() -> None:
    client = OpenAIChatCompletionClient(model=MODEL, model_info=INFO, max_tokens=TOKENS)

    async def ask(question: str) -> None:
        agent = AssistantAgent(
            "helper",
            client,
            tools=[calculator, search],
            model_context=UnboundedChatCompletionContext(initial_messages=examples()),
            system_message=INSTRUCTIONS,
            reflect_on_tool_use=True,
        )
        await agent.run(task=question)

    await ask_all(ask)
    await client.close()


asyncio.run(main())
