"""Run an agent made with a framework: `python frameworks.py FRAMEWORK NUMBER [ARGUMENT...]`.

It runs in the clients' own environment and knows nothing of Pawl. Nothing is set but what a
row of the benchmark is about, and the numbers of tokens and turns, because a small model rambles.
The questions follow from NUMBER: two agents seldom have the same tasks, and who sent a conversation
that names no session can only be told by its words. Prints how many runs failed, by error.
"""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

MODEL = "agent"
TOKENS = 64
MOST_TURNS = 2
INSTRUCTIONS = "Use the calculator."
# A model of 135M parameters writes a tool call only if it is shown the form: these questions and
# answers stand in the conversation before what is asked.
EXAMPLES = (
    ("What is 23 * 47?", '[calculator(expression="23 * 47")]'),
    ("What is 65 + 12 * 8?", '[calculator(expression="65 + 12 * 8")]'),
    ("What is 31 * 4 + 2?", '[calculator(expression="31 * 4 + 2")]'),
)
QUESTIONS = 20
Ask = Callable[[str], Awaitable[object]]


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + and *.
    """
    try:
        terms = [map(int, term.split("*")) for term in expression.split("+")]
        return str(sum(map(math.prod, terms)))
    except ValueError:
        return "That is no expression of integers, + and *."


def search(query: str) -> str:
    """Search an encyclopedia.

    Args:
        query: what is looked for.
    """
    return f"There is no article on {query}."


def messages(question: str) -> list[dict[str, str]]:
    """Return the examples and a question, as most APIs take them."""
    shown = []
    for asked, answered in EXAMPLES:
        shown.append({"role": "user", "content": asked})
        shown.append({"role": "assistant", "content": answered})
    return [*shown, {"role": "user", "content": question}]


def langgraph() -> Ask:
    """A graph of two of LangChain's agents, writer and checker."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(model=MODEL, max_completion_tokens=TOKENS)
    graph = StateGraph(MessagesState)
    graph.add_node("writer", create_agent(model, [calculator, search], system_prompt=INSTRUCTIONS))
    graph.add_node("checker", create_agent(model, [calculator], system_prompt="Check it."))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "checker")
    graph.add_edge("checker", END)
    team = graph.compile()
    return lambda question: team.ainvoke({"messages": messages(question)}, {"recursion_limit": 8})


def agents_sdk(api: str = "responses", tools: str = "strict") -> Ask:
    """OpenAI's Agents SDK: `chat`, `responses` or `streamed`; by default responses, strict."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api

    if api == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(
        name="helper",
        model=MODEL,
        instructions=INSTRUCTIONS,
        tools=[function_tool(tool, strict_mode=tools == "strict") for tool in (calculator, search)],
        model_settings=ModelSettings(max_tokens=TOKENS),
    )

    async def ask(question: str) -> None:
        if api == "streamed":
            run = Runner.run_streamed(agent, messages(question), max_turns=MOST_TURNS)
            async for _ in run.stream_events():
                pass
        else:
            await Runner.run(agent, messages(question), max_turns=MOST_TURNS)

    return ask


def autogen() -> Ask:
    """AutoGen's assistant agent, which reflects on what its tools returned."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.model_context import UnboundedChatCompletionContext
    from autogen_core.models import (
        AssistantMessage,
        LLMMessage,
        ModelFamily,
        ModelInfo,
        UserMessage,
    )
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    # AutoGen wants to know what a model can do whose name it does not know.
    info = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=False,
        family=ModelFamily.UNKNOWN,
        structured_output=False,
    )
    client = OpenAIChatCompletionClient(model=MODEL, model_info=info, max_tokens=TOKENS)
    shown: list[LLMMessage] = []
    for asked, answered in EXAMPLES:
        shown.append(UserMessage(content=asked, source="user"))
        shown.append(AssistantMessage(content=answered, source="helper"))

    async def ask(question: str) -> None:
        agent = AssistantAgent(
            "helper",
            client,
            tools=[calculator, search],
            model_context=UnboundedChatCompletionContext(initial_messages=list(shown)),
            system_message=INSTRUCTIONS,
            reflect_on_tool_use=True,
        )
        await agent.run(task=question)

    return ask


def pydantic_ai() -> Ask:
    """pydantic-ai's agent, with a tool and a structured output."""
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

    class Answer(BaseModel):
        """Answer a question."""

        value: int

    shown: list[ModelMessage] = []
    for asked, answered in EXAMPLES:
        shown.append(ModelRequest(parts=[UserPromptPart(asked)]))
        shown.append(ModelResponse(parts=[TextPart(answered)]))
    agent = Agent(
        OpenAIChatModel(MODEL),
        output_type=Answer,
        tools=[calculator],
        instructions=INSTRUCTIONS,
        model_settings=ModelSettings(max_tokens=TOKENS),
    )
    return lambda question: agent.run(question, message_history=shown)


def anthropic(kind: str) -> Ask:
    """Anthropic's SDK: its tool runner, `whole` or `streamed`."""
    from anthropic import AsyncAnthropic, beta_async_tool

    client = AsyncAnthropic()

    async def calculate(expression: str) -> str:
        return calculator(expression)

    async def look_up(query: str) -> str:
        return search(query)

    calculate.__doc__, look_up.__doc__ = calculator.__doc__, search.__doc__

    async def ask(question: str) -> None:
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=TOKENS,
            system=INSTRUCTIONS,
            messages=messages(question),
            tools=[
                beta_async_tool(calculate, name="calculator"),
                beta_async_tool(look_up, name="search"),
            ],
            max_iterations=MOST_TURNS,
            stream=kind == "streamed",
        )
        async for reply in runner:
            if kind == "streamed":
                await reply.get_final_message()

    return ask


def openai(kind: str) -> Ask:
    """openai-python's chat completions with settings of one kind, every second reply streamed."""
    from openai import AsyncOpenAI

    schema = {
        "type": "object",
        "properties": {"value": {"type": "integer"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    answer = {"name": "answer", "schema": schema, "strict": True}
    settings = {
        # What the cards of models that think recommend.
        "thinking": {"temperature": 0.6, "top_p": 0.95, "extra_body": {"top_k": 20}},
        "penalties": {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "extra_body": {"repetition_penalty": 1.1},
        },
        "schema": {"response_format": {"type": "json_schema", "json_schema": answer}},
    }[kind]
    client = AsyncOpenAI()

    async def ask(question: str) -> None:
        is_streamed = int(question.split()[2]) % 2 == 1
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=TOKENS,
            stream=is_streamed,
            **settings,
        )
        if is_streamed:
            async for _ in reply:
                pass

    return ask


async def main(framework: str, number: int, *arguments: str) -> None:
    """Ask all questions at once; a small model often fails as an agent, its calls were made."""
    ask = globals()[framework](*arguments)
    first = 12 + QUESTIONS * number
    asked = [f"What is {n} * {n + 5} + {n % 7}?" for n in range(first, first + QUESTIONS)]
    ends = await asyncio.gather(*map(ask, asked), return_exceptions=True)
    failed = [end for end in ends if isinstance(end, Exception)]
    # Each kind of error has the words of its first.
    words = {type(end): f"{type(end).__name__}: {end}"[:200] for end in reversed(failed)}
    print(json.dumps(Counter(words[type(end)] for end in failed)))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
