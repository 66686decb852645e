"""Run real agents for `benchmarks.stitching`: each client's own code runs a plan's turns.

None of them is told an episode's name. Imports are local: a client whose package is not
installed is replayed from its recording.
"""

import json
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Final

from benchmarks.stitching.plans import Plan

MODEL: Final = "policy"
SYSTEM: Final = "You are a careful calculator."
KEY: Final = "none"
PACKAGES: Final = {
    "openai": ("openai",),
    "langchain": ("langchain-openai", "openai"),
    "agents": ("openai-agents", "openai"),
    "autogen": ("autogen-agentchat", "autogen-ext", "openai"),
    "anthropic": ("anthropic",),
}


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word}: a word."


TOOLS: Final[dict[str, Callable[..., str]]] = {"add": add, "look_up": look_up}
PARAMETERS: Final = {
    "add": {"a": {"type": "number"}, "b": {"type": "number"}},
    "look_up": {"word": {"type": "string"}},
}


def _schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": PARAMETERS[name],
        "required": list(PARAMETERS[name]),
    }


def _chat_tools() -> Any:
    return [
        {"type": "function", "function": {"name": name, "parameters": _schema(name)}}
        for name in TOOLS
    ]


async def run_openai(url: str, plan: Plan) -> None:
    """Run the plain SDK as its documentation does: the reply's message is sent back."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for turn in plan.turns:
            messages.append({"role": "user", "content": turn.question})
            calls: Any = True
            while calls:
                reply = await client.chat.completions.create(
                    model=MODEL, messages=messages, tools=_chat_tools()
                )
                message = reply.choices[0].message
                messages.append(message)
                calls = message.tool_calls
                for call in calls or ():
                    result = TOOLS[call.function.name](**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def run_langchain(url: str, plan: Plan) -> None:
    """Run LangChain's chat model with bound tools."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, use_responses_api=False)
    model = chat.bind_tools([convert_to_openai_tool(tool) for tool in TOOLS.values()])
    messages: list[Any] = [SystemMessage(SYSTEM)]
    for turn in plan.turns:
        messages.append(HumanMessage(turn.question))
        calls: Any = True
        while calls:
            message = await model.ainvoke(messages)
            messages.append(message)
            calls = message.tool_calls
            for call in calls:
                result = TOOLS[call["name"]](**call["args"])
                messages.append(ToolMessage(result, tool_call_id=call["id"]))


async def run_agents(url: str, plan: Plan) -> None:
    """Run OpenAI's Agents SDK on the Responses API; the server keeps a `retried` plan's state."""
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        agent = Agent(
            name="calculator",
            instructions=SYSTEM,
            tools=[function_tool(tool) for tool in TOOLS.values()],
            model=OpenAIResponsesModel(MODEL, client),
        )
        config = RunConfig(tracing_disabled=True)
        stateful = plan.kind == "retried"
        history: list[Any] = []
        previous: str | None = None
        for turn in plan.turns:
            asked = {"role": "user", "content": turn.question}
            result = await Runner.run(
                agent,
                [asked] if stateful else [*history, asked],
                run_config=config,
                previous_response_id=previous,
                auto_previous_response_id=stateful,
            )
            history = result.to_input_list()
            previous = result.last_response_id if stateful else None


async def run_autogen(url: str, plan: Plan) -> None:
    """Run AutoGen's assistant, which reflects on its tools' results without tools."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=KEY,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": "unknown",
            "structured_output": False,
        },
    )
    agent = AssistantAgent(
        "calculator",
        model_client=client,
        system_message=SYSTEM,
        tools=list(TOOLS.values()),
        max_tool_iterations=2,
        reflect_on_tool_use=True,
    )
    for turn in plan.turns:
        await agent.run(task=turn.question)
    await client.close()


async def run_anthropic(url: str, plan: Plan) -> None:
    """Run Anthropic's SDK; the mark of what is to be cached moves on with each call."""
    from anthropic import AsyncAnthropic

    tools: Any = [{"name": name, "input_schema": _schema(name)} for name in TOOLS]
    async with AsyncAnthropic(base_url=url, api_key=KEY) as client:
        messages: list[Any] = []
        for turn in plan.turns:
            messages.append({"role": "user", "content": turn.question})
            calls: Any = True
            while calls:
                reply = await client.messages.create(
                    model=MODEL,
                    max_tokens=100,
                    system=SYSTEM,
                    messages=[*messages[:-1], _marked(messages[-1])],
                    tools=tools,
                )
                messages.append({"role": "assistant", "content": reply.content})
                calls = [block for block in reply.content if block.type == "tool_use"]
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": TOOLS[block.name](**block.input),
                    }
                    for block in calls
                ]
                if results:
                    messages.append({"role": "user", "content": results})


def _marked(message: dict[str, Any]) -> Any:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    blocks[-1] = blocks[-1] | {"cache_control": {"type": "ephemeral"}}
    return message | {"content": blocks}


RUNNERS: Final[dict[str, Callable[[str, Plan], Awaitable[None]]]] = {
    "openai": run_openai,
    "langchain": run_langchain,
    "agents": run_agents,
    "autogen": run_autogen,
    "anthropic": run_anthropic,
}


def versions(client: str) -> dict[str, str] | None:
    """Return the versions of a client's packages; None if one is not installed."""
    try:
        return {package: metadata.version(package) for package in PACKAGES[client]}
    except metadata.PackageNotFoundError:
        return None
