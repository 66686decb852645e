"""The six agents, each written with another framework, as somebody would who never saw Pawl.

    python work.py desk --url http://127.0.0.1:8100 --out episodes.jsonl

An agent works on its tasks and posts a reward for each; that is all that the proxy learns of it.
One JSON line an episode goes out: {"family", "reward"}. It runs in the environment of
the clients, where the frameworks are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from tasks import STRANGERS, Task, make_tasks

MODEL = "smollm2"
Answer = Callable[[Any, str], Awaitable[Any]]

# --- desk: pydantic-ai ---------------------------------------------------------------------------

DESKS = "Name the desk for the message: billing, account or shipping."
DESK_EXAMPLES = (
    ("The bill for the sofa is too high.", "billing"),
    ("My table is lost on the way to Nice.", "shipping"),
    ("I forgot my password.", "account"),
    ("You took 30 euros twice.", "billing"),
    ("When will the desk be delivered?", "shipping"),
    ("Delete my user please.", "account"),
)


async def name_desk(message: str, url: str) -> str:
    from pydantic_ai import Agent, ModelRequest, ModelResponse, TextPart, UserPromptPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    history: list[Any] = []
    for asked, desk in DESK_EXAMPLES:
        history.append(ModelRequest(parts=[UserPromptPart(asked)]))
        history.append(ModelResponse(parts=[TextPart(desk)]))
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="unused"))
    agent = Agent(model, instructions=DESKS, model_settings={"max_tokens": 8})
    return str((await agent.run(message, message_history=history)).output)


# --- order: OpenAI Agents SDK, the Responses API --------------------------------------------------

ORDERS = "Write the order as JSON."
ORDER_EXAMPLES = (
    ("Two spoons to Rome, for Max.", '{"item": "spoon", "count": 2, "city": "Rome"}'),
    ("Eva here, I need nine pens in Oslo.", '{"item": "pen", "count": 9, "city": "Oslo"}'),
)


async def write_order(text: str, url: str) -> str:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
    from agents.exceptions import ModelBehaviorError
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    history: list[Any] = []
    for asked, written in ORDER_EXAMPLES:
        history += [{"role": "user", "content": asked}, {"role": "assistant", "content": written}]
    async with AsyncOpenAI(base_url=url, api_key="unused") as client:
        agent = Agent(
            name="orders",
            instructions=ORDERS,
            model=OpenAIResponsesModel(MODEL, client),
            model_settings=ModelSettings(max_tokens=48),
        )
        try:
            result = await Runner.run(agent, [*history, {"role": "user", "content": text}])
        except ModelBehaviorError:
            return "cut off"
    return str(result.final_output)


# --- tool: LangChain, two calls -------------------------------------------------------------------

TOOL_RULES = "Use a tool: weather, clock, people or trains."
TOOL_EXAMPLES = (
    ("How warm is it in Rome?", "weather: Rome", "7 degrees", "7 degrees"),
    ("What time is it in Oslo?", "clock: Oslo", "14:20", "14:20"),
    ("Is there a train to Kiel?", "trains: Kiel", "8:05", "8:05"),
    ("How big is Bonn?", "people: Bonn", "31,000", "31,000"),
    ("Is it cold in Metz?", "weather: Metz", "2 degrees", "2 degrees"),
    ("How late is it in Graz?", "clock: Graz", "22:41", "22:41"),
    ("Who lives in Linz?", "people: Linz", "74,000", "74,000"),
)


def run_tool(name: str, town: str) -> str:
    number = sum(map(ord, name + town))
    return {
        "weather": f"{number % 30} degrees",
        "clock": f"{number % 24}:{number % 49 + 10}",
        "people": f"{number % 89 + 10},000",
        "trains": f"{number % 13 + 6}:{number % 47 + 10}",
    }.get(name, "unknown tool")


async def use_tool(question: str, url: str) -> dict[str, str]:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=url, api_key="unused", max_tokens=24)
    messages: list[Any] = [SystemMessage(TOOL_RULES)]
    for asked, call, found, said in TOOL_EXAMPLES:
        messages += [HumanMessage(asked), AIMessage(call), HumanMessage(found), AIMessage(said)]
    messages.append(HumanMessage(question))
    chosen = str((await chat.ainvoke(messages)).content)
    name, _, town = chosen.strip().partition(": ")
    found = run_tool(name, town)
    if found == "unknown tool":
        return {"tool": name, "town": town, "found": found, "said": ""}
    messages += [AIMessage(chosen), HumanMessage(found)]
    return {
        "tool": name,
        "town": town,
        "found": found,
        "said": str((await chat.ainvoke(messages)).content),
    }


# --- unit: openai, streamed ----------------------------------------------------------------------

UNIT_EXAMPLES = (("4 km in m", "4000 m"), ("31 m in cm", "3100 cm"), ("650 kg in g", "650000 g"))


async def convert(asked: str, url: str) -> str:
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "system", "content": "Convert the units."}]
    for given, result in UNIT_EXAMPLES:
        messages += [{"role": "user", "content": given}, {"role": "assistant", "content": result}]
    async with AsyncOpenAI(base_url=url, api_key="unused") as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[*messages, {"role": "user", "content": asked}],
            max_tokens=16,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


# --- list: AutoGen, short and long answers, no task is named -------------------------------------


async def write_list(asked: str, url: str) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.model_context import BufferedChatCompletionContext
    from autogen_core.models import AssistantMessage, UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=url,
        api_key="unused",
        max_tokens=200,
        model_info={
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "family": "unknown",
            "structured_output": False,
        },
    )
    shown = [
        UserMessage(content="Write 3 pets for Max, of Rome.", source="user"),
        AssistantMessage(content="1. dog\n2. cat\n3. hamster", source="writer"),
        UserMessage(content="Write 6 meals for Eva, of Oslo.", source="user"),
        AssistantMessage(
            content="1. soup\n2. pizza\n3. salad\n4. rice\n5. stew\n6. pie", source="writer"
        ),
    ]
    agent = AssistantAgent(
        "writer",
        client,
        model_context=BufferedChatCompletionContext(20, initial_messages=shown),
        system_message="Write numbered lists.",
    )
    result = await agent.run(task=asked)
    await client.close()
    return str(result.messages[-1].content)  # type: ignore[union-attr]


# --- form: openai, a conversation of one to four calls ------------------------------------------


FORM_EXAMPLES = (
    ("name: Max, age: 31, city: Rome, job: clerk. age?", "31"),
    ("job?", "clerk"),
    ("name: Eva, age: 52, city: Oslo, job: judge. city?", "Oslo"),
    ("name?", "Eva"),
    ("name: Tom, age: 24, city: Bonn, job: guard. job?", "guard"),
    ("age?", "24"),
)


async def fill_in(form: dict[str, Any], url: str) -> list[str]:
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "system", "content": "Answer with one word."}]
    for asked, given in FORM_EXAMPLES:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": given}]
    answers = []
    async with AsyncOpenAI(base_url=url, api_key="unused") as client:
        for number, name in enumerate(form["asked"]):
            asked = f"{name}?" if number else f"{form['text']} {name}?"
            messages.append({"role": "user", "content": asked})
            reply = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=12
            )
            answers.append(reply.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


ANSWERS: dict[str, Answer] = {
    "desk": name_desk,
    "order": write_order,
    "tool": use_tool,
    "unit": convert,
    "list": write_list,
    "form": fill_in,
}

# --- the work -----------------------------------------------------------------------------------


async def work(options: argparse.Namespace) -> None:
    stranger = STRANGERS[options.stranger]
    count = -(-options.episodes // options.attempts)
    tasks = make_tasks(stranger, options.seed, count, held_out=options.held_out)
    attempts = [
        (number, task) for number, task in enumerate(tasks) for _ in range(options.attempts)
    ][: options.episodes]
    room = asyncio.Semaphore(options.at_once)
    async with httpx.AsyncClient(timeout=120) as client:
        with options.out.open("a") as out:

            async def one(position: int, number: int, task: Task) -> None:
                await asyncio.sleep(60 * position / options.a_minute if options.a_minute else 0)
                async with room:
                    reward, answer = await episode(client, options, number, task)
                    line = {"family": task.family, "reward": reward}
                    if options.shows:
                        line |= {"given": task.given, "answer": answer}
                    print(json.dumps(line), file=out, flush=True)

            await asyncio.gather(
                *(one(position, *attempt) for position, attempt in enumerate(attempts))
            )


async def episode(
    client: httpx.AsyncClient, options: argparse.Namespace, number: int, task: Task
) -> tuple[float, Any]:
    name = uuid.uuid4().hex
    split = "/split/eval" if options.held_out else ""
    url = options.url
    if STRANGERS[options.stranger].names_tasks:
        url += f"/task/{task.family.replace(' ', '-')}:{options.seed}-{number}"
    answer = await ANSWERS[options.stranger](task.given, f"{url}/episode/{name}{split}/v1")
    reward = STRANGERS[options.stranger].reward(task, answer)
    posted = await client.post(f"{options.url}/feedback", json={"episode": name, "value": reward})
    posted.raise_for_status()
    return reward, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stranger", choices=ANSWERS)
    parser.add_argument("--url", required=True, help="the proxy, without /v1")
    parser.add_argument("--out", type=Path, required=True, help="gets a line an episode")
    parser.add_argument("--episodes", type=int, default=1500)
    parser.add_argument("--attempts", type=int, default=8, help="episodes a task")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--a-minute", type=float, help="at most so many; default: no limit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="evaluation: is not learned from")
    parser.add_argument("--shows", action="store_true", help="write tasks and answers, too")
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "unused")
    asyncio.run(work(options))


if __name__ == "__main__":
    main()
