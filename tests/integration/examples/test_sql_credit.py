"""The sql example through the proxy: how its queries ended is known, and counts in the credit."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.rollout.agents import named_url
from pawl.scenarios.scenario import CLIENTS, find_scenario
from proxy.tool_events import parse_readers
from store.read.facts import matched_events
from store.records import Episode
from store.values.rewards import REWARD_ALONE
from store.version_states import ensure_base
from tests.integration.conftest import proxy_with, settings_for
from tests.integration.examples.test_framework_agents import SQL, run_program
from tests.support.servers.fake_upstream import FakeUpstream, whole_reply
from trainer.credit.air import air_reward
from trainer.credit.returns import account_of
from trainer.recipes.recipe import load_recipe

pytestmark = pytest.mark.skipif(
    not CLIENTS.exists(),
    reason="no frameworks here: `make test` or scripts/install_clients.py gets them",
)
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
        url = named_url(proxy.url, task="t", episode="e", split=None)
        printed = await run_program(scenario.folder, f"{url}/v1", ROLES)
        assert printed == f"{SQL}\n"
        [episode] = await proxy.episodes(calls)
    assert len(episode.calls) == calls
    return episode


def air(episode: Episode) -> float:
    rule = load_recipe(str(find_scenario("sql").folder / "recipe.toml")).credit
    calls = account_of(episode, REWARD_ALONE).calls
    return air_reward([event for call in calls for event in call.events], rule)


def statuses(episode: Episode) -> list[list[tuple[str | None, str]]]:
    return [[(e.tool, e.status) for e in matched_events(call)] for call in episode.calls]


async def test_a_query_that_fails_costs_and_one_that_runs_pays(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> None:
    episode = await an_episode(database_url, engine, upstream, tmp_path, WRONG)
    writer, rewriter = [("execute_sql", "error")], [("execute_sql", "ok")]
    assert statuses(episode) == [writer, [], rewriter, []]
    assert episode.stray_tool_events == ()
    assert air(episode) == pytest.approx(0.2 * (1 - 0.5) / 2)
    # The queries were not written by a tool call: their own text was what ran.
    assert json.loads(episode.calls[0].reply or b"")["choices"][0]["message"]["content"] == (
        f"{WRONG}\n"
    )


async def test_a_first_query_that_runs_pays_all_of_air(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> None:
    episode = await an_episode(database_url, engine, upstream, tmp_path, SQL)
    assert statuses(episode) == [[("execute_sql", "ok")], []]
    assert air(episode) == pytest.approx(0.2)
