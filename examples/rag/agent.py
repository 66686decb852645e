"""Answer questions about towns with OpenAI's Agents SDK: an agent that searches first.

As a program, it reads one question as a line of JSON ({"question": "..."}), and prints the answer.
The model server is the one in OPENAI_BASE_URL and OPENAI_API_KEY. It is asked over the Responses
API, the SDK's default, or over chat completions if OPENAI_API is `chat_completions`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import sys
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from facts import corpus
from openai import AsyncOpenAI
from rank_bm25 import BM25Okapi

INSTRUCTIONS = "Answer the question. Search first. Put the answer in <answer></answer>."
MOST_TURNS = 4
# Worked examples, shown to the model as real earlier turns: question, searches with their results,
# answer. The last needs two facts: a small model imitates the newest most.
EXAMPLES: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...] = (
    (
        "Who is the mayor of Oakstow?",
        (("Who is the mayor of Oakstow?", "The mayor of Oakstow is Lena Marsh."),),
        "Lena Marsh",
    ),
    (
        "When was Hartsea founded?",
        (("When was Hartsea founded?", "Hartsea was founded in 1342."),),
        "1342",
    ),
    (
        "Which river flows through Quenby?",
        (("Which river flows through Quenby?", "The river Tavel flows through Quenby."),),
        "Tavel",
    ),
    (
        "What is the favourite dish of Wyelow?",
        (
            (
                "What is the favourite dish of Wyelow?",
                "The favourite dish of Wyelow is turnip broth.",
            ),
        ),
        "turnip broth",
    ),
    (
        "In which town was the mayor of Fernley born?",
        (
            ("Who is the mayor of Fernley?", "The mayor of Fernley is Ada Holt."),
            ("Where was Ada Holt born?", "Ada Holt was born in Brackwell."),
        ),
        "Brackwell",
    ),
)
set_tracing_disabled(True)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@functools.cache
def index() -> tuple[BM25Okapi, list[str]]:
    sentences = corpus()
    return BM25Okapi([words(sentence) for sentence in sentences]), sentences


@function_tool
def search(query: str) -> str:
    """Find the fact that fits a query best."""
    facts, sentences = index()
    [found] = facts.get_top_n(words(query), sentences, n=1)
    return str(found)


def worked_examples() -> list[Any]:
    items: list[Any] = []
    for question, searches, answer in EXAMPLES:
        items.append({"role": "user", "content": question})
        for query, found in searches:
            call = {"call_id": f"call_{len(items)}", "name": "search"}
            items += [
                {"type": "function_call", **call, "arguments": json.dumps({"query": query})},
                {"type": "function_call_output", "call_id": call["call_id"], "output": found},
            ]
        items.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return items


@functools.cache
def shared_client() -> AsyncOpenAI:
    return AsyncOpenAI()


def model_of(name: str, base_url: str | None) -> Model:
    client = shared_client()
    if base_url is not None:
        client = client.with_options(base_url=base_url)
    if os.environ.get("OPENAI_API") == "chat_completions":
        return OpenAIChatCompletionsModel(name, client)
    return OpenAIResponsesModel(name, client)


async def answer(
    task: dict[str, Any], base_url: str | None = None, model: str | None = None
) -> str:
    """Return the agent's answer to one question; empty if it did not end or called a wrong tool."""
    agent = Agent(
        name="researcher",
        instructions=INSTRUCTIONS,
        tools=[search],
        model=model_of(model or os.environ.get("OPENAI_MODEL", "rag"), base_url),
        model_settings=ModelSettings(temperature=1.0, max_tokens=48),
    )
    asked = [*worked_examples(), {"role": "user", "content": task["question"]}]
    try:
        result = await Runner.run(agent, asked, max_turns=MOST_TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):
        # An unknown tool or too many turns are the model's fault: the answer is empty.
        return ""
    return str(result.final_output)


if __name__ == "__main__":
    print(asyncio.run(answer(json.loads(sys.stdin.readline()))))
