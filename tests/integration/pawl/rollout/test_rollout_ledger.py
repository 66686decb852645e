"""`pawl rollout` against a real proxy: its keys, and the ledger after kills and failures."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.rollout import RolloutFlags, run_rollout
from pawl.rollout.tasks import RolloutError
from pawl.settings import ClientSettings
from store.read.episodes import read_episodes
from store.records import Episode
from store.selecting import select_episodes
from tests.integration.conftest import Proxy
from tests.support.proxy.keys import bearer, made, taken
from tests.support.rollouts import COMMAND, Runner
from tests.support.waiting import eventually

TASKS = [{"id": f"t{number}", "q": f"q{number}", "a": "2", "seconds": 0.3} for number in range(5)]


async def stored(proxy: Proxy, statements: int) -> list[Episode]:
    """All episodes, once so many statements are stored, and have found their episodes.

    A run that was killed before its first call has no episode: what says so is stored alone.
    """

    async def look() -> list[Episode]:
        async with proxy.engine.connect() as connection:
            asked = (
                "SELECT count(*) FROM feedback"
                " WHERE episode_id IS NOT NULL OR metric = 'run_abandoned'"
            )
            if (await connection.execute(text(asked))).scalar_one() < statements:
                return []
            return await read_episodes(connection, await select_episodes(connection))

    found: list[Episode] = await eventually(look)
    return found


def rewards(episode: Episode) -> list[float]:
    return [float(one.value or 0) for one in episode.feedback if one.metric == "reward"]


@pytest.mark.parametrize(
    "how", [COMMAND, ("--python", "agent:answer")], ids=["program", "function"]
)
async def test_killed_runner_leaves_a_single_scored_episode_for_each_run(
    proxy: Proxy, tmp_path: Path, how: tuple[str, str]
) -> None:
    runner = Runner(tmp_path, proxy.url, TASKS)
    options = (*how, "-n", "4", "-k", "4", "--answer", "a")
    for settled in (2, 7, 13):
        process = await runner.start(*options)
        await runner.until_settled(settled)
        process.kill()
        await process.communicate()
    outcome = await runner.run(*options)
    assert outcome.status == 0, outcome.errors
    episodes = await stored(proxy, 20 + outcome.summary["abandoned"])
    scored = [episode for episode in episodes if rewards(episode)]
    assert Counter(episode.task for episode in scored) == {f"t{n}": 4 for n in range(5)}
    assert all(len(rewards(episode)) == 1 for episode in scored)
    assert all(len(episode.calls) == 1 for episode in scored)
    others = [episode for episode in episodes if not rewards(episode)]
    assert {one.metric for episode in others for one in episode.feedback} <= {"run_abandoned"}


async def test_a_failed_run_is_an_episode_without_a_reward(proxy: Proxy, tmp_path: Path) -> None:
    tasks = [{"id": "good", "a": "x"}, {"id": "bad", "a": "x", "do": "exit"}]
    runner = Runner(tmp_path, proxy.url, tasks)
    outcome = await runner.run(*COMMAND, "--answer", "a", "--split", "eval")
    assert outcome.status == 1
    episodes = {episode.task: episode for episode in await stored(proxy, 2)}
    assert {episode.split for episode in episodes.values()} == {"eval"}
    assert rewards(episodes["good"]) == [0.0]
    assert [(one.metric, one.value) for one in episodes["bad"].feedback] == [("run_failed", 1.0)]


AGENT = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}]}).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request, timeout=30) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"])
"""


async def test_rollout_and_agent_each_use_their_own_key(
    proxy: Proxy, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"id": "t1", "a": "hi"}\n')
    runner = await made(engine, "runner", "infer", "feedback", "read")
    agent = await made(engine, "agent", "infer")
    await taken(proxy, runner)
    monkeypatch.setenv("OPENAI_API_KEY", agent)
    flags = RolloutFlags(
        tasks=Path("tasks.jsonl"),
        url=proxy.url,
        command=[sys.executable, "agent.py"],
        answer="a",
    )
    with pytest.raises(RolloutError, match="401: set PAWL_API_KEY"):
        await run_rollout(flags)
    monkeypatch.setenv("PAWL_API_KEY", runner)
    assert ClientSettings().headers == bearer(runner)
    summary = await run_rollout(flags)
    assert (summary["runs"], summary["failed"], summary["reward"]) == (1, 0, 1.0)
    journal = (tmp_path / "tasks.rollout.jsonl").read_text()
    assert runner not in journal
    assert agent not in journal
