"""Stewards that are killed while they try version after version: each change is made, and once.

20 kills; 200 with `--hypothesis-profile=long`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import IO

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.read.events import list_events
from store.updates.gating import make_candidate
from store.updates.policies import ensure_base
from tests.fuzz.profile import is_long
from tests.integration.conftest import free_port
from tests.integration.pawl.steward.test_gating import RULE, live, pass_time, states, trained_on
from tests.support.waiting import eventually

# A steward lives so long at most, in seconds: it begins, and looks some times.
LONGEST_S = 1.5
# Whoever moves traffic locks the policy, and whoever changes a state its version.
HOLD = text(
    "SELECT version FROM policies WHERE name = 'm' AND version = CASE WHEN :base THEN 0 ELSE"
    " (SELECT max(version) FROM policies WHERE name = 'm') END FOR UPDATE"
)


class Killer:
    """Kill a steward after a time of chance, again and again; count."""

    def __init__(self, engine: AsyncEngine, process: asyncio.subprocess.Process) -> None:
        self._engine = engine
        self._process = process
        self._random = Random(16)
        self.kills = 0

    async def follow(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            lives_s = self._random.uniform(0.0, LONGEST_S)
            if self._random.random() < 0.5:
                await self._in_the_middle(int(line), lives_s)
            else:
                await asyncio.sleep(lives_s)
                os.kill(int(line), signal.SIGKILL)
            self.kills += 1

    async def _in_the_middle(self, pid: int, lives_s: float) -> None:
        """Kill one that may wait for a lock at that time, with a part of its changes made."""
        await asyncio.sleep(lives_s / 2)
        async with self._engine.connect() as connection:
            await connection.execute(HOLD, {"base": self._random.random() < 0.5})
            await asyncio.sleep(lives_s / 2)
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def killing_stewards(
    database_url: str, engine: AsyncEngine, folder: Path
) -> AsyncIterator[Killer]:
    with (folder / "stewards.log").open("wb") as log:
        process = await begun(database_url, folder, log)
    killer = Killer(engine, process)
    following = asyncio.create_task(killer.follow())
    try:
        yield killer
        assert process.returncode is None
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def begun(database_url: str, folder: Path, log: IO[bytes]) -> asyncio.subprocess.Process:
    """Stewards, one after the other, of no model server."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.support.forked_steward"),
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()),
            "DATABASE_URL": database_url,
            "PAWL_STEWARD_LISTEN": f"127.0.0.1:{free_port()}",
            "PAWL_STEWARD_POLL_S": "0.02",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )


async def is_tried(engine: AsyncEngine, number: int, serving: int, *, is_better: bool) -> None:
    """Let a version be tried beside the one that serves, until there is a verdict."""
    async with engine.begin() as connection:
        await trained_on(connection, number, serving)
        dumped = RULE.model_dump(mode="json")
        await make_candidate(connection, "m", number, dumped, reason="probed")

    async def becomes(*wanted: str) -> None:
        async def has() -> bool:
            return (await states(engine))[number] in wanted

        await eventually(has, within_s=120.0)

    await becomes("canary")
    await pass_time(engine)
    mine, others = ([1.0, 0.9], [0.0, 0.1]) if is_better else ([0.0, 0.1], [1.0, 0.9])
    await live(engine, {("serving", serving): others, ("canary", number): mine}, run=str(number))
    await becomes("serving", "rolled_back")


@pytest.mark.timeout(0 if is_long() else 600)
async def test_each_change_is_made_once_and_says_why(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    random, number, serving = Random(7), 0, 0
    expected: dict[int, list[str]] = {0: ["serving"]}
    async with engine.begin() as connection:
        await ensure_base(connection, "m", "m")
    async with killing_stewards(database_url, engine, tmp_path) as killer:
        while killer.kills < (200 if is_long() else 20):
            number += 1
            is_better = random.random() < 0.6
            await is_tried(engine, number, serving, is_better=is_better)
            end = "serving" if is_better else "rolled_back"
            expected[number] = ["written", "candidate", "canary", end]
            if is_better:
                expected[serving].append("published")
                serving = number
    assert await states(engine) == {one: states[-1] for one, states in expected.items()}
    async with engine.connect() as connection:
        events = await list_events(connection, "m", most=10_000)
    found: dict[int, list[str]] = {}
    last: dict[int, str | None] = dict.fromkeys(expected)
    for event in reversed(events):
        found.setdefault(event.version, []).append(event.to_state)
        assert event.reason
        assert event.from_state == last[event.version]
        last[event.version] = event.to_state
        assert (event.actor == "steward") == (
            event.from_state in ("candidate", "canary", "serving")
        )
    assert found == expected
