"""Pawl's own clients show a proxy the key that it asks for."""

import json
import sys
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.rollout import Flags, run_rollout
from pawl.rollout.tasks import RolloutError
from pawl.settings import ClientSettings
from store.tenants import scoped
from tests.integration.conftest import Proxy
from tests.integration.pawl.judging.test_judge import Bench, bench, pawl_judge
from tests.support.proxy.keys import bearer, key_of, made, status, taken
from tests.support.waiting import eventually

__all__ = ["bench"]

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


async def test_judge_sees_and_scores_the_episodes_of_its_keys_tenant(
    proxy: Proxy,
    engine: AsyncEngine,
    bench: Bench,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tenant in ("a", "b"):
        agent = await key_of(engine, tenant, "infer", "read")
        await taken(proxy, agent)
        for name in ("good-1", f"good-{tenant}"):
            reply = await proxy.chat(headers={**bearer(agent), "x-pawl-episode": name})
            assert reply.status == 200
    await proxy.episodes(4)
    key = await key_of(engine, "a", "feedback")

    async def known() -> bool:
        # It is for no other endpoint.
        return await status(proxy, "/v1/embeddings", bearer(key)) == 403

    await eventually(known)
    monkeypatch.setenv("PAWL_API_KEY", key)
    code, out, err = await pawl_judge(
        *("--once", "--quiet", "0", "--json", "--", *bench.command),
        database_url=database_url,
        listen=proxy.settings.listen,
    )
    assert (code, json.loads(out)) == (0, {"judged": 2, "cannot_tell": 0, "failed": 0})
    assert key not in err
    assert bench.asked == ["good-1", "good-a"]

    async def scored() -> list[str]:
        found = await proxy.episodes(4)
        said = [one.key for one in found if one.feedback or one.calls[0].feedback]
        return sorted(said) if len(said) == 2 else []

    assert await eventually(scored) == [scoped("a", "good-1"), scoped("a", "good-a")]


async def test_rollout_shows_its_key_and_the_agent_its_own(
    proxy: Proxy, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"id": "t1", "a": "hi"}\n')
    runner = await made(engine, "runner", "infer", "feedback", "read")
    agent = await made(engine, "agent", "infer")
    await taken(proxy, runner)
    monkeypatch.setenv("OPENAI_API_KEY", agent)
    flags = Flags(
        tasks=Path("tasks.jsonl"),
        url=proxy.url,
        command=f"{sys.executable} agent.py",
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
