"""Each change of a version is made once: kill processes while episodes decide about versions.

A proxy, a trainer, a controller and a model server that computes are up; clients run
episodes and score them as a judge would; in the mode `evaluated` the controller runs tasks beside
them. A process is killed (`kill -9`) at a random moment while a
version is tried, and started again after another one. In the end each change of a version's state
must have been made once, with its reason; no call is missing, unscored, or without an arm, and none
failed but where the proxy or the model server was down.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
from rich.console import Console
from rich.progress import Progress
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from benchmarks.chaos.trainer import ComputingServer, RunPlace
from store.database import make_engine
from store.version_queries import list_events, list_versions
from store.versions import PolicyEvent, PolicyState, PolicyVersion
from tests.support.faults.ledger import Scrapes, drained, kept
from tests.support.faults.stand import PARTS, NotReady, Stand
from tests.support.trainer.scored_episodes import BASE, MEMBERS, recipe_toml, write_model
from tests.support.trainer.zygote import Zygote

# Each as often as its place in the list.
VICTIMS: Final = (
    *("controller", "controller", "trainer", "trainer", "model server"),
    *("worker", "ingester", "supervisor"),
)
QUIET_S, AWAY_S = (0.2, 1.5), (0.0, 0.5)
# A trainer begins with an adapter on trial, and then waits for two groups.
TRIED_WITHIN_S: Final = 300.0
DRAIN_S: Final = 120.0
AT_ONCE: Final = 6
# Longer than a call waits for a version that is not loaded.
PATIENCE_S: Final = 30.0
# Without a model server a call ends so.
EXCUSED: Final = (200, 202, 502)
BROKEN: Final = (aiohttp.ClientError, OSError, TimeoutError)
# Rewards of the base model, of good versions, and of bad ones; each has some noise. Of every five
# versions one is bad, and one turns bad after so many episodes: it serves by then.
REWARDS: Final = {"base": 0.5, "good": 0.9, "bad": 0.1}
NOISE, CYCLE, BAD, TURNS, TURNS_AFTER = 0.1, 5, 2, 3, 250
RECIPE: Final = (
    recipe_toml().replace("max_age_s = 1e9", "max_age_s = 5.0")
    # The last table is [publish].
    + """
mode = "canary"
control_share = 0.2
margin = 0.1
reward_delay_s = 2.0
decide_within_h = 0.01
mistakes = 0.2
"""
)
EVALUATION: Final = """
[evaluation]
tasks = "{tasks}"
python = "tests.support.controller.evaluated_agent:answer"
answer = "right"
tries = 2
most_runs = 80
timeout_s = 20.0
url = "http://127.0.0.1:{port}"
"""
TASKS: Final = 20
_WITHOUT_ARM: Final = text(
    "SELECT count(*) FROM transitions t JOIN episodes e ON e.id = t.episode_id"
    " WHERE t.policy = :policy AND t.arm IS NULL AND COALESCE(e.joined_split, e.split) = 'train'"
)
_SCORED: Final = text("SELECT count(*) FROM episodes WHERE key = ANY(:keys) AND reward IS NOT NULL")
# Versions that had an episode each: more than one where it had to leave, or changed without need.
_CHANGED: Final = text(
    "SELECT count(*) FROM (SELECT episode_id FROM transitions WHERE policy = :policy"
    " GROUP BY episode_id HAVING count(DISTINCT policy_version) > 1) AS several"
)
_IS_TRIED: Final = text(
    "SELECT EXISTS (SELECT FROM policies WHERE name = :policy"
    " AND (state = 'canary' OR state = 'loaded' AND gate->>'mode' = 'evaluated'))"
)
_IS_DECIDED: Final = text(
    "SELECT EXISTS (SELECT FROM policy_events WHERE name = :policy AND actor = 'controller'"
    " AND to_state IN ('serving', 'rejected', 'rolled_back'))"
)


class NothingTried(Exception):
    """Report that no version was tried, or decided about, for long, with the trainer's log."""


def canary_kills(
    forks: Zygote,
    folder: Path,
    kills: int,
    seed: int,
    mode: Literal["canary", "evaluated"] = "canary",
) -> dict[str, dict[str, Any]]:
    """Kill so many times; what became of the versions, the calls and the rewards.

    Versions are tried as the recipe's `publish.mode` says.

    Raises:
        NothingTried: see there.
        NotUp: the model server did not come up.
    """
    write_model(folder / "model")
    parts = Parts(forks, folder)
    recipe = RECIPE
    if mode == "evaluated":
        tasks = [json.dumps({"id": f"t-{n}", "right": "yes"}) for n in range(TASKS)]
        (folder / "tasks.jsonl").write_text("\n".join(tasks))
        asked = EVALUATION.format(tasks=folder / "tasks.jsonl", port=parts.stand.port)
        recipe = RECIPE.replace('mode = "canary"', 'mode = "evaluated"') + asked
    (folder / "recipe.toml").write_text(recipe)
    try:
        return {mode: asyncio.run(_run(parts, kills, seed))}
    finally:
        parts.stand.postgres.stop()


class Parts:
    """Hold all that can be killed, and count what was."""

    def __init__(self, forks: Zygote, folder: Path) -> None:
        self.server = ComputingServer(forks, folder, folder / "model")
        self.server.start()
        self.stand = Stand(folder, f"http://127.0.0.1:{self.server.port}/v1", workers=2)
        self.killed: Counter[str] = Counter()
        self.by_themselves: list[str] = []
        self._place = RunPlace(folder, self.stand.url, (BASE,), folder / "model")
        self._forks, self._pids = forks, dict[str, int]()

    def start(self, role: str) -> None:
        """Start the trainer or the controller."""
        log = self._place.folder / f"{role}.log"
        settings = self._place.settings(self.server.port) | {"PAWL_ADAPTER_SLOTS": "1000000"}
        self._pids[role] = self._forks.start(role, log, settings)

    async def kill(self, victim: str, away_s: float, which: int) -> None:
        """Kill one, and start it again after some seconds; return when the proxy is ready.

        Raises:
            NotReady: it is not, after a minute.
        """
        self.killed[victim] += 1
        for part in PARTS:
            if part == victim:
                await self.stand.kill(part, which)
                return
        if victim == "model server":
            await asyncio.to_thread(self.server.kill)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(self.server.start)
        else:
            await asyncio.to_thread(self._kill, victim)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(self.start, victim)

    def stop(self) -> None:
        """Ask trainer and controller to end, and then kill the server."""
        for role, pid in self._pids.items():
            self._note_status(role, self._forks.stop(pid), 0)
        self.server.kill()

    def _kill(self, role: str) -> None:
        status = self._forks.end(self._pids[role], signal.SIGKILL)
        self._note_status(role, status, -signal.SIGKILL)

    def _note_status(self, role: str, status: int | None, wanted: int) -> None:
        if status != wanted:
            self.by_themselves.append(f"{role}: status {status}, not {wanted}")


async def _run(parts: Parts, kills: int, seed: int) -> dict[str, Any]:
    stand, began, stalled = parts.stand, time.monotonic(), []
    await stand.ready()
    for role in ("trainer", "controller"):
        parts.start(role)
    clients, is_over = Clients(stand.port, seed), asyncio.Event()
    working = asyncio.create_task(clients.run(is_over))
    engine, dice = make_engine(stand.url), random.Random(seed)
    try:
        with Progress(console=Console(stderr=True)) as progress:
            for _ in progress.track(range(kills), description="kills while a version is tried"):
                await asyncio.sleep(dice.uniform(*QUIET_S))
                if working.done():
                    working.result()
                await _until(parts, engine, _IS_TRIED)
                await parts.kill(dice.choice(VICTIMS), dice.uniform(*AWAY_S), dice.randrange(2))
        await _until(parts, engine, _IS_DECIDED)
    except NotReady as error:
        stalled.append(str(error))
    is_over.set()
    await working
    await asyncio.to_thread(parts.stop)
    drain_s = await drained(stand.admin, Scrapes(), within_s=DRAIN_S)
    await asyncio.to_thread(stand.stop)
    async with engine.connect() as connection:
        ledger = await _ledger(connection, clients.scored)
    await engine.dispose()
    calls = await kept(stand.url, clients.answered, own_episodes=False)
    return {
        "seconds": round(time.monotonic() - began),
        "killed": dict(parts.killed),
        "statuses": dict(clients.statuses),
        "failed_otherwise": clients.failed_otherwise,
        "drain_s": drain_s,
        "calls_answered": calls.answered,
        "missing": calls.missing,
        **ledger,
        "by_themselves": parts.by_themselves,
        "ended_by_itself": stand.ended_by_itself,
        "stalled": stalled,
    }


async def _until(parts: Parts, engine: AsyncEngine, is_so: TextClause) -> None:
    """Wait until the ledger says so."""
    deadline = time.monotonic() + TRIED_WITHIN_S
    async with engine.connect() as connection:
        while not await connection.scalar(is_so, {"policy": BASE}):
            if time.monotonic() > deadline:
                log = parts.stand.log.with_name("trainer.log")
                raise NothingTried(log.read_text(errors="replace")[-3000:])
            await connection.rollback()
            await asyncio.sleep(0.1)


async def _ledger(connection: AsyncConnection, scored: Sequence[str]) -> dict[str, Any]:
    """Return what the ledger has of a run, and what is wrong with it."""
    events = (await list_events(connection, BASE, most=1_000_000))[::-1]
    versions = await list_versions(connection, BASE)
    with_reward = await connection.scalar(_SCORED, {"keys": list(scored)})
    changes = Counter(f"{event.from_state} → {event.to_state}" for event in events)
    return {
        "episodes_scored": len(scored),
        "scores_missing": len(set(scored)) - (with_reward or 0),
        "without_arm": await connection.scalar(_WITHOUT_ARM, {"policy": BASE}),
        "episodes_of_several_versions": await connection.scalar(_CHANGED, {"policy": BASE}),
        "versions": len(versions) - 1,
        "changes": dict(changes.most_common()),
        "wrong_events": _wrong_events(events, versions),
    }


def _wrong_events(events: Sequence[PolicyEvent], versions: Sequence[PolicyVersion]) -> list[str]:
    """Return what is wrong with the changes of states, oldest first, and the states they led to.

    Each begins where the one before it ended, and has a reason; the last is the version's state.
    Why a version stays in its state is said once. One version serves, and one at most is tried, and
    one at most is the control.
    """
    last: dict[int, PolicyState | None] = {}
    stays: set[tuple[int, str]] = set()
    wrong = []
    for event in events:
        before = last.get(event.version)
        change = f"{event.version}: {event.from_state} → {event.to_state} by {event.actor}"
        if event.from_state != before:
            wrong.append(f"{change}, where it was {before}")
        if not event.reason:
            wrong.append(f"{change}: no reason")
        if event.from_state == event.to_state:
            if (event.version, event.reason) in stays:
                wrong.append(f"{change}: said again: {event.reason}")
            stays.add((event.version, event.reason))
        last[event.version] = event.to_state
    wrong += [
        f"{one.version} is {one.state}, and its events end at {last.get(one.version)}"
        for one in versions
        if one.state != last.get(one.version)
    ]
    states = Counter(one.state for one in versions)
    controls = sum(one.state == "retired" and one.share is not None for one in versions)
    if states["serving"] != 1 or states["canary"] > 1 or controls > 1:
        tried = states["canary"]
        wrong.append(f"{states['serving']} versions serve, {tried} are tried, {controls} control")
    return wrong


class Clients:
    """Run episodes of one call or two at once, and POST what each was worth until that is taken.

    Attributes:
        answered: the ids of calls whose reply came whole.
        scored: the episodes whose reward was taken.
        statuses: calls and statements by their status; 0: there was no answer.
        failed_otherwise: answers that no kill excuses, with how they begin.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.answered: list[str] = []
        self.scored: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.failed_otherwise: list[str] = []
        self._url = f"http://127.0.0.1:{port}"
        self._dice, self._numbers = random.Random(seed), count()
        self._episodes: Counter[int] = Counter()

    async def run(self, is_over: asyncio.Event) -> None:
        """Run episodes until it is over; each is ended then, and its reward taken."""
        limit = aiohttp.ClientTimeout(total=PATIENCE_S)
        # No connection is kept: whoever is started again gets new ones at once.
        connector = aiohttp.TCPConnector(force_close=True)

        async def client() -> None:
            while not is_over.is_set():
                await self._episode(session, next(self._numbers))
                await asyncio.sleep(0.02)

        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def _episode(self, session: aiohttp.ClientSession, number: int) -> None:
        """Make the calls of an episode; one that was answered to its end gets its reward."""
        episode, version = f"canaries-{number}", 0
        headers = {"x-pawl-episode": episode, "x-pawl-task": f"task-{number // MEMBERS}"}
        body = {"model": BASE, "prompt": (5, 6, 7, 8), "max_tokens": 2, "temperature": 1.0}
        for _ in range(1 + number % 2):
            status, told = await self._post(session, "/v1/completions", body, headers)
            if status != 200:
                await asyncio.sleep(0.1)
                return
            self.answered.append(told["x-pawl-call"])
            # Until the proxy knows of the policy, the base model answers without a version.
            version = int(told.get("x-pawl-policy", "@0").rpartition("@")[2])
        statement = {"episode": episode, "value": self._worth(version)}
        key = {"Idempotency-Key": os.urandom(8).hex()}
        status = 0
        while not 200 <= status < 300:
            status, _ = await self._post(session, "/feedback", statement, key)
            await asyncio.sleep(0.02)
        self.scored.append(episode)

    def _worth(self, version: int) -> float:
        """Return the reward of one more episode of a version."""
        self._episodes[version] += 1
        has_turned = version % CYCLE == TURNS and self._episodes[version] > TURNS_AFTER
        is_bad = version % CYCLE == BAD or has_turned
        level = REWARDS["base" if not version else "bad" if is_bad else "good"]
        return level + self._dice.uniform(-NOISE, NOISE)

    async def _post(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> tuple[int, Mapping[str, str]]:
        """Return status and headers of a reply that came whole; the status is 0 if none did."""
        status, told = 0, dict[str, str]()
        with suppress(*BROKEN):
            async with session.post(f"{self._url}{path}", json=body, headers=headers) as reply:
                content = await reply.read()
                status, told = reply.status, dict(reply.headers)
                if status not in EXCUSED:
                    self.failed_otherwise.append(f"{status}: {content[:200].decode()}")
        self.statuses[status] += 1
        return status, {name.lower(): value for name, value in told.items()}
