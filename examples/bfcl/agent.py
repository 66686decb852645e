"""Answer tasks of the Berkeley Function Calling Leaderboard with OpenAI's client and its `tools`.

As a program, it reads one task as a line of JSON, as `tasks.py` prints it, and prints the calls
that the model made. The model server is the one in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from leaderboard import ADDED, SEVERAL_TURNS, forget, run_calls, tools
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

MOST_TOKENS = 512
# As many as the leaderboard's own client takes.
MOST_STEPS = 20
# Fields of a reply that go into the next request.
KEPT = {"role", "content", "tool_calls"}


@functools.cache
def shared_client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def answer(
    task: dict[str, Any], base_url: str | None = None, model: str | None = None
) -> str:
    """Return the calls that the model made, as JSON."""
    client = shared_client()
    if base_url is not None:
        client = client.with_options(base_url=base_url)
    ask = functools.partial(
        client.chat.completions.create,
        model=model or os.environ.get("OPENAI_MODEL", "bfcl"),
        temperature=task.get("temperature", 1.0),
        max_tokens=MOST_TOKENS,
    )
    if task["category"] in SEVERAL_TURNS:
        return json.dumps({"turns": await run_turns(task, ask)})
    reply = await ask(messages=task["question"], tools=tools(task["function"]))
    message = reply.choices[0].message
    made = [{name: arguments} for _, name, arguments in calls_of(message)]
    return json.dumps({"calls": made, "well_formed": bool(message.tool_calls)})


async def run_turns(task: dict[str, Any], ask: Any) -> list[list[list[str]]]:
    """Run all turns of a task on the simulated APIs; return the calls by turn and step."""
    name = f"run_{uuid4().hex}"
    run = functools.partial(run_calls, task, name)
    functions, messages = list(task["function"]), list[Any]()
    turns = []
    try:
        for number, question in enumerate(task["question"]):
            added = task["missed_function"].get(str(number), [])
            functions += added
            messages += [{"role": "user", "content": ADDED}] if added else question
            turns.append(await run_turn(ask, run, functions, messages))
    finally:
        forget(name)
    return turns


async def run_turn(
    ask: Any, run: Any, functions: list[dict[str, Any]], messages: list[Any]
) -> list[list[str]]:
    """Run the calls of the model until a reply has none, and return them by step.

    All messages are added to `messages`.
    """
    steps = []
    offered, known = tools(functions), {one["name"] for one in functions}
    for _ in range(MOST_STEPS):
        message = (await ask(messages=messages, tools=offered)).choices[0].message
        made = calls_of(message)
        messages.append(message.model_dump(exclude_none=True, include=KEPT))
        if not made:
            break
        written = [python_call(name, arguments, known) for _, name, arguments in made]
        results = run(written)
        steps.append(written)
        for (call_id, _, _), result in zip(made, results, strict=True):
            messages.append(result_message(call_id, result))
    return steps


def result_message(call_id: str | None, result: str) -> dict[str, Any]:
    """Return a call's result as a message; a call that was written as text has no id."""
    if call_id is None:
        return {"role": "user", "content": result}
    return {"role": "tool", "tool_call_id": call_id, "content": result}


def python_call(name: str, arguments: dict[str, Any], known: set[str]) -> str:
    """Return a call as Python, which the leaderboard runs; `unknown_function()` if not allowed."""
    if name not in known or not all(map(str.isidentifier, arguments)):
        return "unknown_function()"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def calls_of(message: ChatCompletionMessage) -> list[tuple[str | None, str, dict[str, Any]]]:
    """Return id, name and arguments of each call, parsed by the server or written as JSON text.

    Qwen2.5-Coder writes calls as text, without the tags that the server's parser looks for.
    """
    if not message.tool_calls:
        return [(None, *call) for call in written_calls(message.content or "")]
    made = []
    for call in message.tool_calls:
        arguments = parse_json(call.function.arguments)
        made.append((call.id, call.function.name, arguments if isinstance(arguments, dict) else {}))
    return made


def written_calls(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and arguments of the calls that a text contains as JSON objects."""
    decoder, at = json.JSONDecoder(), 0
    while (begin := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, begin)
        except ValueError:
            at = begin + 1
            continue
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(found.get("name"), str) and isinstance(arguments, dict):
            yield found["name"], arguments


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


if __name__ == "__main__":
    print(asyncio.run(answer(json.loads(sys.stdin.readline()))))
