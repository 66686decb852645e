"""Stewards that are killed while they try version after version: each change is made, and once.

Some of the versions fall behind once they serve, and of some of these the one before was retired.
20 kills and 6 trials; 200 and 20 with `--hypothesis-profile=long`.
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

from proxy.policies.versions import arms_of
from store.read.events import list_events
from store.records import Arm
from store.version_queries import list_live
from store.version_states import ensure_base, make_candidate
from tests.fuzz.profile import is_long
from tests.support.ledger.lineage import set_state
from tests.support.steward.trials import RULE, live, pass_time, states, trained_on
from tests.support.waiting import eventually
from trainer.publishing.reconciler import is_servable

# A steward lives so long at most, in seconds: it begins, and looks some times. On a slow machine
# it comes to nothing in that time, so that the next ones have more, until one has moved something.
LONGEST_S = 1.5
MORE = 1.1
GOOD, BAD = [1.0, 0.9], [0.0, 0.1]
# Episodes of each arm: 80 are enough to promote one that is as good as what serves.
MANY = 120
FEWEST_KILLS, FEWEST_TRIALS = (200, 20) if is_long() else (20, 6)
# Whoever moves traffic locks the policy, and whoever changes a state its version.
HOLD = text(
    "SELECT version FROM policies WHERE name = 'm' AND version = CASE WHEN :base THEN 0 ELSE"
    " (SELECT max(version) FROM policies WHERE name = 'm') END FOR UPDATE"
)
# A trial's episodes began in the last hour, as those of the trials before did, which are not its.
PASS_OVER = text("DELETE FROM episode_policies WHERE policy = 'm'")


class Killer:
    """Kill a steward after a time of chance, again and again; count."""

    def __init__(self, engine: AsyncEngine, process: asyncio.subprocess.Process) -> None:
        self._engine = engine
        self._process = process
        self._random = Random(16)
        self._longest_s = LONGEST_S
        self.kills = 0

    def has_moved(self) -> None:
        """Let the next ones live as long as the first: somebody has moved something."""
        self._longest_s = LONGEST_S

    async def follow(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            lives_s = self._random.uniform(0.0, self._longest_s)
            self._longest_s *= MORE
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
            "PAWL_STEWARD_LISTEN": "127.0.0.1:0",
            "PAWL_STEWARD_POLL_S": "0.02",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )


class Arrivals:
    """Give an arm to one episode after the other, as a proxy does; count."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.episodes = 0

    async def follow(self) -> None:
        while True:
            async with self._engine.connect() as connection:
                versions = await list_live(connection, "m")
            arms = arms_of(versions)["m"]
            loaded = {one.version for one in versions if is_servable(one)}
            for _ in range(20):
                self.episodes += 1
                arm = arms.of_new(f"arrives-{self.episodes}")
                assert arms.version_of(arm) in loaded | {0}


@asynccontextmanager
async def arriving(engine: AsyncEngine) -> AsyncIterator[None]:
    arrivals = Arrivals(engine)
    following = asyncio.create_task(arrivals.follow())
    try:
        yield
    finally:
        following.cancel()
        [ended] = await asyncio.gather(following, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), ended
    assert arrivals.episodes


async def becomes(engine: AsyncEngine, killer: Killer, number: int, *wanted: str) -> None:
    async def has() -> bool:
        return (await states(engine))[number] in wanted

    await eventually(has, within_s=300.0)
    killer.has_moved()


async def give(engine: AsyncEngine, arms: dict[tuple[Arm, int], list[float]], run: str) -> None:
    """Let these episodes, and no others, be the evidence."""
    async with engine.begin() as connection:
        await connection.execute(PASS_OVER)
    await pass_time(engine)
    await live(engine, arms, run=run, many=MANY)


async def is_tried(
    engine: AsyncEngine, killer: Killer, number: int, serving: int, *, is_better: bool
) -> None:
    """Let a version be tried beside the one that serves, until there is a verdict."""
    async with engine.begin() as connection:
        await trained_on(connection, number, serving)
        dumped = RULE.model_dump(mode="json")
        await make_candidate(connection, "m", number, dumped, reason="probed")
    await becomes(engine, killer, number, "canary")
    arms: dict[tuple[Arm, int], list[float]] = {("canary", number): GOOD if is_better else BAD}
    if serving:
        # It stays as far above the base as it was: this is not the trial in which it falls.
        arms |= {("serving", serving): GOOD, ("base", 0): BAD}
    else:
        arms["serving", 0] = BAD if is_better else GOOD
    await give(engine, arms, str(number))
    await becomes(engine, killer, number, "serving" if is_better else "rolled_back")


async def falls(
    engine: AsyncEngine, killer: Killer, number: int, before: int, *, is_retired: bool
) -> None:
    """Let what serves fall behind the base, until it is rolled back.

    If `is_retired`, what served before it is on no server by then, and no server can be asked.
    """
    if is_retired:
        async with engine.begin() as connection:
            await set_state(connection, "m", before, "retired", reason="idle", actor="trainer")
    arms: dict[tuple[Arm, int], list[float]] = {("base", 0): GOOD, ("serving", number): BAD}
    await give(engine, arms, f"{number}-falls")
    await becomes(engine, killer, number, "rolled_back")


@pytest.mark.timeout(0 if is_long() else 1200)
async def test_each_change_is_made_once_and_says_why(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    random, number, serving = Random(7), 0, 0
    expected: dict[int, list[str]] = {0: ["serving"]}
    async with engine.begin() as connection:
        await ensure_base(connection, "m", "m")
    async with (
        arriving(engine),
        killing_stewards(database_url, engine, tmp_path) as killer,
    ):
        while killer.kills < FEWEST_KILLS or number < FEWEST_TRIALS:
            number += 1
            is_better = random.random() < 0.6
            await is_tried(engine, killer, number, serving, is_better=is_better)
            expected[number] = ["written", "candidate", "canary"]
            if not is_better:
                expected[number].append("rolled_back")
                continue
            before, serving = serving, number
            expected[number].append("serving")
            expected[before].append("published")
            if random.random() < 0.5:
                is_retired = before > 0 and random.random() < 0.5
                await falls(engine, killer, number, before, is_retired=is_retired)
                expected[number].append("rolled_back")
                if is_retired:
                    expected[before] += ["retired", "published"]
                serving = 0 if is_retired else before
                expected[serving].append("serving")
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
        is_trainers = event.from_state in (None, "written") or event.to_state == "retired"
        assert (event.actor == "trainer") == is_trainers
    assert found == expected
