"""The examples' agents on the real frameworks, against a plain server and through the proxy."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
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


@pytest.mark.parametrize("case", CASES)
async def test_example_agent_runs_against_a_plain_model_server_without_pawl_headers(
    case: str,
) -> None:
    model, environment, paths = CASES[case]
    name = case.split(maxsplit=1)[0]
    async with plain_server(model) as server:
        printed = await run_program(find_scenario(name).folder, server.url, environment)
    assert printed.startswith(OUTPUTS[name])
    others = [path for _, path, _ in server.other]
    assert ["/v1/chat/completions"] * len(server.requests) + others == paths
    headers = [name.lower() for sent in server.headers for name in sent]
    assert not [name for name in headers if name.startswith("x-pawl")]


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


@pytest.mark.parametrize("name", ["math", "sql", "rag"])
async def test_example_agent_answers_when_hosted_by_a_scenario(name: str, tmp_path: Path) -> None:
    scenario = find_scenario(name)
    log = tmp_path / "log"
    agent = CoroutineAgent(str(CLIENTS), scenario.agent, scenario.folder, log)
    async with plain_server(CASES[name][0]) as server:
        variables = {"OPENAI_BASE_URL": server.url}
        if scenario.requested_model:
            variables["OPENAI_MODEL"] = scenario.requested_model
        try:
            await agent.start()
            result = await agent.run(
                Request(task={"question": "What?"}, environment=variables, limit_s=60)
            )
        finally:
            await agent.stop()
    assert result.error is None, (result.detail, log.read_text()[-2000:])
    assert result.output.startswith(OUTPUTS[name])


# Through the proxy: how the queries of the sql example ended is known.

WRONG = "SELECT age FROM nowhere"
ROLES = {f"{role.upper()}_MODEL": "m" for role in ("writer", "checker", "rewriter")}


def said(asked: dict[str, Any], first: str) -> str:
    """As the writer, say `first`; as the rewriter, the right query."""
    if asked["messages"][0]["content"].startswith("Does the result"):
        return "yes"
    return SQL if "Previous: no such table" in asked["messages"][-1]["content"] else first


async def an_episode(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, folder: Path, first: str
) -> Episode:
    async def behave(request: web.Request) -> web.Response:
        asked = upstream.requests[-1]
        reply = whole_reply(asked, len(upstream.requests))
        reply["choices"][0]["message"]["content"] = f"{said(asked, first)}\n"
        return web.json_response(reply)

    upstream.behave = behave
    scenario = find_scenario("sql")
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    settings = settings_for(database_url, upstream.url, folder).model_copy(
        update={"tool_results": parse_readers(scenario.tool_results or "")}
    )
    calls = 2 if first == SQL else 4
    async with proxy_with(settings, engine) as proxy:
        url = run_url(proxy.url, task="t", episode="e", split=None)
        printed = await run_program(scenario.folder, f"{url}/v1", ROLES)
        assert printed == f"{SQL}\n"
        [episode] = await proxy.episodes(calls)
    assert len(episode.calls) == calls
    return episode


def air(episode: Episode) -> float:
    rule = load_recipe(str(find_scenario("sql").folder / "recipe.toml")).credit
    calls = account_of(episode, REWARD_ALONE).calls
    events = scored_events((event for call in calls for event in call.events), rule)
    return air_reward(events, NO_USUAL_SCORES, rule.air_lambda)


@pytest.mark.parametrize(
    ("first", "statuses", "credit"),
    [
        (WRONG, [["error"], [], ["ok"], []], 0.2),
        (SQL, [["ok"], []], 0.2),
    ],
    ids=["a query that failed and was corrected costs nothing", "a first query that runs pays all"],
)
async def test_sql_agents_queries_are_tool_events_that_count_in_the_credit(
    database_url: str,
    engine: AsyncEngine,
    upstream: FakeUpstream,
    tmp_path: Path,
    first: str,
    statuses: list[list[str]],
    credit: float,
) -> None:
    episode = await an_episode(database_url, engine, upstream, tmp_path, first)
    events = [[(one.tool, one.status) for one in matched_events(call)] for call in episode.calls]
    assert events == [[("execute_sql", status) for status in one] for one in statuses]
    assert episode.stray_tool_events == ()
    assert air(episode) == pytest.approx(credit)
    # The queries were not written by a tool call: their own text was what ran.
    written = json.loads(episode.calls[0].reply or b"")["choices"][0]["message"]["content"]
    assert written == f"{first}\n"
