"""The pages about clients, run as they stand: each block, in order, against a real proxy.

A page is one shell script (`tests/support/docs/guides.py`): what it exports is the environment of
its programs. The ledger then has what the page promises: its runs as episodes, their rewards, and
how each tool ended, with the call that asked for it.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.read.episodes import read_episodes
from store.records import Episode, ToolSource, TransitionRow
from store.selecting import select_episodes
from store.version_states import ensure_base
from tests.conftest import ROOT, Psql, database_of
from tests.integration.conftest import Proxy, proxy_with, settings_for
from tests.support.docs.asking_model import ask_for_two_tools
from tests.support.docs.guides import (
    CLIENTS,
    NODE_MODULES,
    client_pages,
    environment,
    write_script,
)
from tests.support.servers.fake_upstream import fake_upstream
from tests.support.waiting import awaited

HOWTO = ROOT / "docs/howto"
# `m` is the one that a test's proxy waits for; the others are those of the pages.
POLICIES = ("m", "smollm2", "my-policy")
LIMIT_S = 120.0
Tools = tuple[tuple[str, str], ...]


class Told(NamedTuple):
    """What the ledger has of an episode; `tools` are status and source by call and tool call.

    A run that names no episode is named for how it was found, and a task that none names `prompt`.
    """

    name: str
    tools: tuple[Tools, ...]
    rewards: tuple[float, ...] = (1.0,)
    task: str = "prompt"
    agent: str = "default"
    trainable: bool = True
    stray: int = 0


def run(name: str, ok: ToolSource, error: ToolSource) -> Told:
    """Two calls: the first asked for two tools, of which one failed."""
    return Told(name, tools=((("ok", ok), ("error", error)), ()))


ALONE = Told("own", tools=((),))
GUIDES = {
    "plain-openai": [ALONE, run("run-7", "header", "header")],
    "plain-openai in node": [ALONE, run("run-8", "header", "header")],
    "langchain": [ALONE, run("run-9", "header", "header")],
    "openai-agents-sdk": [ALONE, run("run-10", "feedback", "feedback")],
    "autogen": [run("run-11", "feedback", "feedback")._replace(agent="helper")],
    "pydantic-ai": [
        ALONE,
        ALONE._replace(rewards=(0.0,)),
        run("run-14", "feedback", "feedback"),
    ],
    "anthropic": [ALONE, run("run-12", "assumed", "is_error")],
    "claude-code": [
        run("session", "is_error", "is_error")._replace(rewards=()),
        run("run-13", "is_error", "is_error")._replace(task="refunds"),
    ],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guided(
    postgres: EmbeddedPostgres,
    psql: Psql,
    template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Proxy]:
    """One proxy for all pages, before a model that asks for two tools at once."""
    with database_of(postgres, psql, template) as url:
        engine = make_engine(url)
        async with engine.begin() as connection:
            for policy in POLICIES:
                await ensure_base(connection, policy)
        async with fake_upstream() as upstream:
            upstream.models = list(POLICIES)
            ask_for_two_tools(upstream)
            settings = settings_for(url, upstream.url, tmp_path_factory.mktemp("proxy"))
            # As `pawl up` tells it: the Agents SDK's tools are strict.
            settings = settings.model_copy(update={"tool_parser": "pythonic"})
            async with proxy_with(settings, engine) as proxy:
                yield proxy
        await engine.dispose()


async def run_script(script: Path) -> None:
    """Run a page's script to its end."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-e", script.name),
        cwd=script.parent,
        env=environment(script.parent),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, out.decode()[-4000:]


async def told(proxy: Proxy) -> dict[str, Told]:
    """What the ledger has, by the episodes' keys, the earliest first."""
    async with proxy.engine.connect() as connection:
        found = await read_episodes(connection, await select_episodes(connection))
    return {episode.key: what_is_told(episode) for episode in found}


def what_is_told(episode: Episode) -> Told:
    [agent] = {call.agent for call in episode.calls}
    return Told(
        name=episode.key if episode.method in ("header", "url") else episode.method,
        tools=tuple(tools_of(call) for call in episode.calls),
        rewards=tuple(one.value for one in episode.feedback if one.metric == "reward"),
        task=(episode.task or "").partition(":")[0],
        agent=agent,
        trainable=all(call.trainable for call in episode.calls),
        stray=len(episode.stray_tool_events),
    )


def tools_of(call: TransitionRow) -> Tools:
    return tuple(
        (event.status, event.source)
        for tool in call.tool_calls
        for event in call.tool_events
        if event.tool_id == tool.id
    )


def test_every_howto_page_about_a_client_is_among_the_tested_guides() -> None:
    run_pages = {HOWTO / f"{guide.partition(' in ')[0]}.md" for guide in GUIDES}
    assert run_pages == set(client_pages())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("guide", GUIDES)
async def test_client_guide_runs_and_records_the_episodes_that_it_promises(
    guide: str, guided: Proxy, tmp_path: Path
) -> None:
    assert CLIENTS.exists(), "no clients here: run `.venv/bin/python scripts/install_clients.py`"
    page, _, node = guide.partition(" in ")
    if node and not NODE_MODULES.exists():
        pytest.skip("the Node clients are not installed (scripts/install_clients.py says why)")
    before = await told(guided)
    program = "js" if node else "python"
    listen = guided.settings.listen
    await run_script(write_script(HOWTO / f"{page}.md", program, listen, tmp_path))

    async def new() -> list[Told]:
        return [one for key, one in (await told(guided)).items() if key not in before]

    assert await awaited(new, lambda found: found == GUIDES[guide], within_s=30) == GUIDES[guide]
