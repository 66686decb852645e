"""The examples' agents, on the real frameworks: they run against any OpenAI-compatible server."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from pawl.rollout.agents import Request
from pawl.scenarios.agent import HostedAgent
from pawl.scenarios.scenario import CLIENTS, find_scenario
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream, whole_reply

pytestmark = pytest.mark.skipif(
    not CLIENTS.exists(),
    reason="no frameworks here: `make test` or scripts/install_clients.py gets them",
)
# From the model that is asked for and the conversation so far to a text, or a tool's arguments.
Reply = str | tuple[str, dict[str, Any]]
Model = Callable[[str, list[dict[str, Any]]], Reply]
SQL: Final = "SELECT COUNT(*) FROM employee WHERE age > 50"


def calculates(_: str, messages: list[dict[str, Any]]) -> Reply:
    """Call the calculator, and say what it found."""
    last = messages[-1]
    if last["role"] == "tool":
        return f"The answer is {last['content']}."
    return "calculator", {"expression": "12 * 34"}


def writes(model: str, messages: list[dict[str, Any]]) -> Reply:
    """Write a wrong query first; as the rewriter, the right one."""
    said = {"writer": "SELECT age FROM nowhere", "checker": "yes", "rewriter": SQL}[model]
    assert model != "rewriter" or "Previous: no such table" in messages[-1]["content"]
    return said


def searches(_: str, items: list[dict[str, Any]]) -> Reply:
    """Search for the question, and answer with all that was found."""
    last = items[-1]
    found = last.get("output") or (last["content"] if last.get("role") == "tool" else None)
    return f"<answer>{found}</answer>" if found else ("search", {"query": "mayor of Marwick"})


CASES: Final = {
    "math": (calculates, {}, ["/v1/chat/completions"] * 2),
    "sql": (writes, {}, ["/v1/chat/completions"] * 4),
    "rag": (searches, {}, ["/v1/responses"] * 2),
    "rag by chat": (searches, {"OPENAI_API": "chat_completions"}, ["/v1/chat/completions"] * 2),
}
OUTPUTS: Final = {
    "math": "The answer is 408.",
    "sql": SQL,
    "rag": "<answer>The mayor of Marwick is",
}


@asynccontextmanager
async def plain_server(model: Model) -> AsyncIterator[FakeUpstream]:
    """Serve a model that says what it is told to say, in chat completions and responses."""

    async def chat(_: web.Request) -> web.Response:
        asked = upstream.requests[-1]
        said, reply = model(asked["model"], asked["messages"]), whole_reply(asked, 1)
        reply["usage"] |= {"prompt_tokens": 3, "total_tokens": 5}
        [choice] = reply["choices"]
        if isinstance(said, str):
            choice["message"]["content"] = said
        else:
            function = {"name": said[0], "arguments": json.dumps(said[1])}
            call = {"id": "call_1", "type": "function", "function": function}
            choice["message"] |= {"content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        return web.json_response(reply)

    async def responses(request: web.Request) -> web.Response:
        asked = await request.json()
        said = model(asked["model"], asked["input"])
        if isinstance(said, str):
            text = {"type": "output_text", "text": said, "annotations": []}
            item = {"type": "message", "role": "assistant", "content": [text]}
        else:
            function = {"name": said[0], "arguments": json.dumps(said[1])}
            item = {"type": "function_call", "call_id": "call_1", **function}
        named = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed"}
        settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        output = [{"id": "item_1", "status": "completed", **item}]
        return web.json_response({**named, **settings, "model": asked["model"], "output": output})

    async with fake_upstream() as upstream:
        upstream.behave, upstream.behave_otherwise = chat, responses
        yield upstream


async def run_program(folder: Path, url: str, environment: dict[str, str]) -> str:
    """Run the agent as a program of its own, and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(str(CLIENTS), "agent.py"),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k"}
        | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate(json.dumps({"question": "What?"}).encode() + b"\n")
    assert process.returncode == 0, errors.decode()[-3000:]
    return out.decode()


@pytest.mark.parametrize("case", CASES)
async def test_agent_runs_as_a_program_against_a_plain_server(case: str) -> None:
    model, environment, paths = CASES[case]
    name = case.split(maxsplit=1)[0]
    async with plain_server(model) as server:
        printed = await run_program(find_scenario(name).folder, server.url, environment)
    assert printed.startswith(OUTPUTS[name])
    others = [path for _, path, _ in server.other]
    assert ["/v1/chat/completions"] * len(server.requests) + others == paths
    headers = [name.lower() for sent in server.headers for name in sent]
    assert not [name for name in headers if name.startswith("x-pawl")]


@pytest.mark.parametrize("name", ["math", "sql", "rag"])
async def test_agent_runs_as_a_scenario_hosts_it(name: str, tmp_path: Path) -> None:
    scenario = find_scenario(name)
    log = tmp_path / "log"
    agent = HostedAgent(str(CLIENTS), scenario.agent, scenario.folder, log)
    async with plain_server(CASES[name][0]) as server:
        variables = {"OPENAI_BASE_URL": server.url}
        if scenario.asks_for:
            variables["OPENAI_MODEL"] = scenario.asks_for
        try:
            await agent.start()
            result = await agent.run(
                Request(task={"question": "What?"}, environment=variables, limit_s=60)
            )
        finally:
            await agent.stop()
    assert result.error is None, (result.detail, log.read_text()[-2000:])
    assert result.output.startswith(OUTPUTS[name])
