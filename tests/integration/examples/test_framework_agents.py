"""The examples' agents on the real frameworks, against a plain server and through the proxy."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.rollout.agents import Request, run_url
from pawl.rollout.functions import CoroutineAgent
from pawl.scenarios.scenario import CLIENTS, find_scenario
from proxy.tool_events import parse_readers
from store.read.facts import matched_events
from store.records import Episode
from store.values.rewards import REWARD_ALONE
from store.version_states import ensure_base
from tests.integration.conftest import proxy_with, settings_for
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream, whole_reply
from trainer.credit.air import NO_USUAL_SCORES, air_reward, scored_events
from trainer.credit.returns import account_of
from trainer.recipes.recipe import load_recipe

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


def searches(_: str, items: list[dict[str, Any]]) -> Reply:
    """Search for the question, and answer with all that was found."""
    last = items[-1]
    found = last.get("output") or (last["content"] if last.get("role") == "tool" else None)
    return f"<answer>{found}</answer>" if found else ("search", {"query": "mayor of Marwick"})


CHAT: Final = "/v1/chat/completions"
MODELS: Final = {"math": calculates, "rag": searches}
OUTPUTS: Final = {
    "math": "The answer is 408.",
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


async def run_program(
    folder: Path,
    url: str,
    environment: dict[str, str],
    *,
    python: str = str(CLIENTS),
    **task: Any,
) -> str:
    """Run the agent as a program of its own, and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(python, "agent.py"),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k"}
        | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    given = json.dumps({"question": "What?"} | task)
    out, errors = await process.communicate(given.encode() + b"\n")
    assert process.returncode == 0, errors.decode()[-3000:]
    return out.decode()


def assert_asked_plainly(server: FakeUpstream, paths: list[str]) -> None:
    """The server was asked at these paths, with no header of Pawl's."""
    others = [path for _, path, _ in server.other]
    assert [CHAT] * len(server.requests) + others == paths
    headers = [name.lower() for sent in server.headers for name in sent]
    assert not [name for name in headers if name.startswith("x-pawl")]


@pytest.mark.parametrize(
    ("name", "environment"), [("math", {}), ("rag", {"OPENAI_API": "chat_completions"})]
)
async def test_example_agent_runs_as_a_program_against_a_plain_model_server(
    name: str, environment: dict[str, str]
) -> None:
    async with plain_server(MODELS[name]) as server:
        printed = await run_program(find_scenario(name).folder, server.url, environment)
    assert printed.startswith(OUTPUTS[name])
    assert_asked_plainly(server, [CHAT] * 2)


async def test_sql_agent_is_shown_the_schema_of_its_tasks_database() -> None:
    def model(name: str, messages: list[dict[str, Any]]) -> Reply:
        if name == "writer":
            assert "CREATE TABLE flight (" in messages[0]["content"]
            assert len(messages) == 2
        return "yes" if name == "checker" else "Here:\n```sql\nSELECT MAX(delay) FROM flight\n```"

    folder = find_scenario("sql").folder
    async with plain_server(model) as server:
        printed = await run_program(folder, server.url, {}, schema="airline")
    assert printed.strip() == "SELECT MAX(delay) FROM flight"
    assert_asked_plainly(server, [CHAT] * 2)


async def test_leaderboard_agent_prints_the_models_tool_calls() -> None:
    x = {"type": "float", "description": "How much."}
    offered = {"type": "dict", "properties": {"x": x}, "required": ["x"]}
    function = {"name": "a.add", "description": "Add.", "parameters": offered}
    question = [{"role": "user", "content": "What?"}]
    async with plain_server(lambda *_: ("a_add", {"x": 1.5})) as server:
        printed = await run_program(
            find_scenario("bfcl").folder,
            server.url,
            {},
            python=sys.executable,
            category="multiple",
            question=question,
            function=[function],
        )
    assert json.loads(printed) == {"calls": [{"a_add": {"x": 1.5}}], "well_formed": True}
    [asked] = server.requests
    assert asked["messages"] == question
    [tool] = asked["tools"]
    assert tool["function"]["name"] == "a_add"
    assert tool["function"]["parameters"]["properties"]["x"]["type"] == "number"


@asynccontextmanager
async def hosted(name: str, log: Path) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Host an example's agent as a scenario does: from its model server's URL to its answer."""
    scenario = find_scenario(name)
    agent = CoroutineAgent(str(CLIENTS), scenario.agent, scenario.folder, log)

    async def run(url: str) -> str:
        variables = {"OPENAI_BASE_URL": url}
        if scenario.requested_model:
            variables["OPENAI_MODEL"] = scenario.requested_model
        task = {"question": "What?"}
        result = await agent.run(Request(task=task, environment=variables, limit_s=60))
        assert result.error is None, (result.detail, log.read_text()[-2000:])
        return result.output

    try:
        await agent.start()
        yield run
    finally:
        await agent.stop()


@pytest.mark.parametrize(("name", "path"), [("math", CHAT), ("rag", "/v1/responses")])
async def test_example_agent_answers_when_hosted_by_a_scenario(
    name: str, path: str, tmp_path: Path
) -> None:
    async with plain_server(MODELS[name]) as server, hosted(name, tmp_path / "log") as run:
        assert (await run(server.url)).startswith(OUTPUTS[name])
        assert_asked_plainly(server, [path] * 2)


# Through the proxy, and hosted, too: how the queries of the sql example ended is known.

WRONG = "SELECT age FROM nowhere"
ROLES = {f"{role.upper()}_MODEL": "m" for role in ("writer", "checker", "rewriter")}
# The first query, how the queries ended in each call, and what that is worth.
CREDITED: Final = {
    "a query that failed and was corrected costs nothing": (
        WRONG,
        [["error"], [], ["ok"], []],
        0.2,
    ),
    "a first query that runs pays all": (SQL, [["ok"], []], 0.2),
}


def said(asked: dict[str, Any], first: str) -> str:
    """As the writer, say `first`; as the rewriter, the right query."""
    if asked["messages"][0]["content"].startswith("Does the result"):
        return "yes"
    return SQL if "Previous: no such table" in asked["messages"][-1]["content"] else first


async def recorded_episodes(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, folder: Path
) -> dict[str, Episode]:
    """Run the agent once for each of `CREDITED`, and return the episodes."""
    first = ""

    async def behave(request: web.Request) -> web.Response:
        asked = upstream.requests[-1]
        reply = whole_reply(asked, len(upstream.requests))
        reply["choices"][0]["message"]["content"] = f"{said(asked, first)}\n"
        return web.json_response(reply)

    upstream.behave = behave
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    settings = settings_for(database_url, upstream.url, folder).model_copy(
        update={"tool_results": parse_readers(find_scenario("sql").tool_results or "")}
    )
    async with proxy_with(settings, engine) as proxy, hosted("sql", folder / "log") as run:
        for name, (query, _, _) in CREDITED.items():
            first = query
            url = run_url(proxy.url, task="t", episode=name, split=None)
            assert await run(f"{url}/v1") == SQL
        calls = sum(len(statuses) for _, statuses, _ in CREDITED.values())
        return {episode.key: episode for episode in await proxy.episodes(calls)}


def air(episode: Episode) -> float:
    rule = load_recipe(str(find_scenario("sql").folder / "recipe.toml")).credit
    calls = account_of(episode, REWARD_ALONE).calls
    events = scored_events((event for call in calls for event in call.events), rule)
    return air_reward(events, NO_USUAL_SCORES, rule.air_lambda)


async def test_sql_agents_queries_are_tool_events_that_count_in_the_credit(
    database_url: str,
    engine: AsyncEngine,
    upstream: FakeUpstream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, model in ROLES.items():
        monkeypatch.setenv(name, model)
    episodes = await recorded_episodes(database_url, engine, upstream, tmp_path)
    assert episodes.keys() == CREDITED.keys()
    for name, (first, statuses, credit) in CREDITED.items():
        calls = episodes[name].calls
        events = [[(one.tool, one.status) for one in matched_events(call)] for call in calls]
        assert events == [[("execute_sql", status) for status in one] for one in statuses]
        assert episodes[name].stray_tool_events == ()
        assert air(episodes[name]) == pytest.approx(credit)
        # The queries were not written by a tool call: their own text was what ran.
        written = json.loads(calls[0].reply or b"")["choices"][0]["message"]["content"]
        assert written == f"{first}\n"
