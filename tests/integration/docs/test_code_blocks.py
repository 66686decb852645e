"""The code of the documents, run: SQL, statements, the pages of the agent runner and of keys.

The pages about clients have a test of their own (`test_client_guides.py`).
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.answers import read_verdict
from proxy.feedback_body import parse_feedback
from store.keys import list_keys
from tests.conftest import ROOT
from tests.integration.conftest import Proxy
from tests.support.docs.documents import split_blocks
from tests.support.docs.shell_lines import commands
from tests.support.ledger.lineage import set_state, trained
from tests.support.rollouts import Runner
from tests.support.servers.fake_upstream import FakeUpstream

HOWTO = ROOT / "docs/howto"
KEYS_S = 150


def code_of(page: Path, language: str) -> str:
    """A page's blocks of one language, as one text."""
    blocks = split_blocks(page, page.read_text())[1]
    return "\n".join(block.text for block in blocks if block.language == language)


@pytest.mark.parametrize(
    "page",
    [page for page in sorted((ROOT / "docs").rglob("*.md")) if code_of(page, "sql")],
    ids=lambda page: page.stem,
)
async def test_sql_of_a_docs_page_runs(page: Path, engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        statements = re.findall(r"[^;]+;", code_of(page, "sql"))
        done = [await connection.execute(text(statement)) for statement in statements]
    assert done
    # A question has an answer; what changes rows finds none of that name here.
    assert all(result.returns_rows or result.rowcount == 0 for result in done)


@pytest.mark.parametrize("page", [HOWTO / "rewards.md", HOWTO / "tool-status.md"], ids=str)
async def test_feedback_bodies_on_the_howto_pages_are_accepted(page: Path, proxy: Proxy) -> None:
    bodies = [
        words[words.index("-d") + 1]
        for line in code_of(page, "sh").splitlines()
        for words in commands(line)
        if words and words[0] == "curl"
    ]
    assert bodies
    for body in bodies:
        assert parse_feedback(body.encode(), datetime.now(UTC), None)
        url = f"{proxy.url}/feedback"
        async with proxy.session.post(url, data=body.encode()) as reply:
            assert reply.status == 202


def rollout_commands() -> list[list[str]]:
    """The commands of the page about the agent runner, without the program's name."""
    lines = code_of(HOWTO / "rollout.md", "sh").splitlines()
    return [words[2:] for line in lines for words in commands(line) if words[1] == "rollout"]


@pytest.mark.parametrize("options", rollout_commands(), ids=" ".join)
async def test_agent_of_the_rollout_page_runs_and_every_run_is_rewarded(
    options: list[str], proxy: Proxy, upstream: FakeUpstream, tmp_path: Path
) -> None:
    page = HOWTO / "rollout.md"
    upstream.models = ["calculator", "calculator@1"]
    tasks = split_blocks(page, page.read_text())[1][0].text
    folder = tmp_path / "here"
    folder.mkdir()
    runner = Runner(folder, proxy.url, [json.loads(line) for line in tasks.splitlines()])
    (folder / "held-out.jsonl").write_text(tasks)
    (folder / "my_agent.py").write_text(code_of(page, "python"))
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Each try is a process that imports an SDK, or costs a call: one shows what eight do.
    fewer = ["1" if before == "-n" else one for before, one in pairwise(["", *options])]
    outcome = await runner.run(*fewer, PATH=here)
    assert outcome.status == 0, outcome.errors
    assert outcome.summary["rewarded"] == outcome.summary["planned"]
    asked = {request["model"] for request in upstream.requests}
    assert asked <= {"calculator", "calculator@1"}


def test_judge_verdict_on_the_rollout_page_is_parsed() -> None:
    told = code_of(HOWTO / "rollout.md", "json").splitlines()
    assert [one["value"] for one in read_verdict(told[-1].encode(), "e")] == [0.8, 212]


def keys_script(proxy: Proxy) -> str:
    """The blocks of the page about keys, with the proxy's addresses and this checkout's `pawl`."""
    script = code_of(HOWTO / "keys.md", "sh")
    for shown, real in (("127.0.0.1:8100", proxy.url), ("127.0.0.1:8101", proxy.admin)):
        assert shown in script
        script = script.replace(shown, real)
    # A key counts within two seconds, as the page says; a script is quicker than its reader.
    curl = 'curl() { command curl --retry 20 --retry-delay 1 --retry-all-errors "$@"; }'
    return f'set -eu\npawl() {{ {sys.executable} -m pawl.cli "$@"; }}\n{curl}\n{script}'


async def test_commands_of_the_page_about_keys_run(
    proxy: Proxy, engine: AsyncEngine, database_url: str, tmp_path: Path
) -> None:
    environment = os.environ | {"DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)}
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", keys_script(proxy)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=KEYS_S,
    )
    assert done.returncode == 0, done.stderr
    assert "# HELP pawl_records_total" in done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()[-4:]]
    listed = {one["name"]: one for one in lines}
    assert set(listed) == {"agent", "ops", "team-a-agents", "team-a-judge"}
    assert (listed["ops"]["per_minute"], listed["ops"]["at_once"]) == (600, 50)
    assert listed["ops"]["tokens_per_minute"] == 2_000_000
    [call] = (await proxy.episodes(1))[0].calls
    assert call.http_status == 200
    async with engine.connect() as connection:
        keys = {key.name: key for key in await list_keys(connection)}
    assert keys["agent"].revoked_at is not None
    assert keys["ops"].revoked_at is None


async def test_commands_of_the_first_week_page_run(
    proxy: Proxy, engine: AsyncEngine, upstream: FakeUpstream, database_url: str, tmp_path: Path
) -> None:
    page = HOWTO / "first-week.md"
    upstream.models = ["m", "m@0"]
    async with engine.begin() as connection:
        await trained(connection, 0)
        await set_state(connection, "m", 1, "loaded")
    (tmp_path / "my_agent.py").write_text(code_of(HOWTO / "rollout.md", "python"))
    (tmp_path / "my_judge.py").write_text(code_of(page, "python"))
    steps = code_of(page, "sh").replace("http://127.0.0.1:8100", proxy.url)
    # A record is stored a moment after its call.
    held = "until pawl export --hold-out 50 --out held-out.jsonl; do sleep 0.2; done"
    steps = steps.replace("pawl export --hold-out 50 --out held-out.jsonl", held)
    script = f'set -eu\npawl() {{ {sys.executable} -P -m pawl.cli "$@"; }}\n{steps}'
    environment = os.environ | {
        "DATABASE_URL": database_url,
        "PAWL_LISTEN": proxy.url.removeprefix("http://"),
        "PYTHONPATH": str(ROOT),
        "OPENAI_API_KEY": "unused",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=KEYS_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [task] = [json.loads(line) for line in (tmp_path / "held-out.jsonl").read_text().splitlines()]
    assert task["question"] == "What is the capital of Peru?"
    assert task["id"].startswith("prompt:")
    async with engine.connect() as connection:
        query = "SELECT split, count(*) FROM episodes GROUP BY split"
        # The recorded episode of the held-out task, and its run; the rewarded one is trained on.
        assert dict((await connection.execute(text(query))).tuples().all()) == {
            "eval": 2,
            "train": 1,
        }
