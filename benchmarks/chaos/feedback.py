"""State thousands of things about episodes while the proxy is killed; see what they come to.

Each client works on an episode of its own: one call, made before, amid or after what is said of it,
and statements of three metrics: values, corrections, withdrawals. Each is sent again until it is
answered, and some a second time after others, under their idempotency keys. So a client knows which
statement of each metric counts, in whatever order records reach the database.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import aiohttp
from sqlalchemy import text

from benchmarks.chaos.load import fetch
from benchmarks.chaos.scrape import Scrapes, drained
from benchmarks.chaos.stand import PARTS, Stand
from benchmarks.proxy.wire import MODEL
from store.connection.engine import make_engine
from store.link.scores import set_reward_rule
from store.read.episodes import episode_ids, read_episodes
from store.records import Feedback
from store.values.rewards import RewardRule, RewardTerm, reward_of
from store.version_states import ensure_base

EACH: Final = 20
AT_ONCE: Final = 16
# One kill to so many statements.
A_KILL: Final = 250
RETRY_S: Final = 0.05
PAUSE_S: Final = (0.3, 2.0)
AWAY_S: Final = 5.0
DRAIN_S: Final = 300.0
# How often a statement that was taken is sent again, later.
AGAIN: Final = 0.2
VALUES: Final[Mapping[str, tuple[float | str | None, ...]]] = {
    "right": (0.0, 1.0, 0.5, None),
    "cost": (0.0, 2.0, 9.0, None),
    "verdict": ("good", "bad", "unheard of", None),
}
SUM: Final = RewardRule(
    terms=(
        RewardTerm(metric="right", low=0.0, high=1.0),
        RewardTerm(metric="cost", weight=-0.1, low=0.0, high=5.0, default=0.0),
        RewardTerm(
            metric="verdict",
            weight=0.5,
            low=-1.0,
            high=1.0,
            default=0.0,
            texts={"good": 1.0, "bad": -1.0},
        ),
    )
)
START: Final = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Told:
    """Hold what was said of each episode, in order, as it was taken; and how it went."""

    of: dict[str, list[Feedback]] = field(default_factory=dict)
    sent: int = 0
    again: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    broken_off: int = 0


async def feedback(stand: Stand, statements: int, seed: int) -> dict[str, Any]:
    """Send so many statements under kills and an outage; compare what is stored."""
    await stand.ready()
    policy = await _trained(stand)
    told, names = Told(), [f"said-{number}" for number in range(statements // EACH)]
    dice = random.Random(seed)
    killing = asyncio.create_task(
        _kill(stand, max(1, statements // A_KILL), random.Random(seed + 1))
    )
    async with aiohttp.ClientSession() as session:
        queue = list(names)

        async def client(own: random.Random) -> None:
            while queue:
                await _work(stand, session, queue.pop(), own, told)

        await asyncio.gather(*(client(random.Random(dice.random())) for _ in range(AT_ONCE)))
    done = await killing
    drain_s = await drained(stand.admin, Scrapes(), within_s=DRAIN_S)
    found = await _compared(stand.url, policy, told)
    await asyncio.to_thread(stand.stop)
    return {
        "statements": sum(map(len, told.of.values())),
        "sent": told.sent,
        "sent_again": told.again,
        "broken_off": told.broken_off,
        "statuses": dict(told.statuses),
        **done,
        "drain_s": drain_s,
        **found,
    }


async def _trained(stand: Stand) -> str:
    """Let the served model be a policy with a sum of its own; return its name once it is."""
    listed = json.loads((await fetch(stand.port, "/v1/models")).body)
    policy: str = listed["data"][0]["id"]
    engine = make_engine(stand.url)
    async with engine.begin() as connection:
        await ensure_base(connection, policy)
        await set_reward_rule(connection, policy, SUM)
    known = text("SELECT EXISTS (SELECT FROM episode_policies)")
    async with aiohttp.ClientSession() as session, engine.connect() as connection:
        while not await connection.scalar(known):
            await _call(stand, session, "before", Told())
            await connection.rollback()
            await asyncio.sleep(RETRY_S)
    await engine.dispose()
    return policy


async def _kill(stand: Stand, kills: int, dice: random.Random) -> dict[str, Any]:
    """Kill processes at random moments; half-way take the database away for a while."""
    killed: Counter[str] = Counter()
    for number in range(kills):
        await asyncio.sleep(dice.uniform(*PAUSE_S))
        if number == kills // 2:
            await asyncio.to_thread(stand.postgres.stop)
            await asyncio.sleep(AWAY_S)
            await stand.start_postgres()
            await stand.ready()
        part = dice.choice(PARTS)
        killed[part] += 1
        await stand.kill(part, dice.randrange(9))
    return {"kills": dict(killed), "away_s": AWAY_S if kills else 0.0}


async def _work(
    stand: Stand, session: aiohttp.ClientSession, name: str, dice: random.Random, told: Told
) -> None:
    """Say all that is said of one episode, and make its call somewhere in between."""
    sent: list[tuple[str, dict[str, Any]]] = []
    call_at = dice.choice([0, dice.randrange(EACH), EACH])
    said = told.of.setdefault(name, [])
    for number in range(EACH):
        if number == call_at:
            await _call(stand, session, name, told)
        metric = dice.choice(list(VALUES))
        value = dice.choice(VALUES[metric])
        statement: dict[str, Any] = {"metric": metric, "episode": name}
        statement |= {"withdrawn": True} if value is None else {"value": value}
        key = f"{name}/{number}"
        await _say(stand, session, key, statement, told)
        said.append(Feedback(metric=metric, value=value, at=START + timedelta(seconds=number)))
        sent.append((key, statement))
        if dice.random() < AGAIN:
            told.again += 1
            await _say(stand, session, *dice.choice(sent), told)
    if call_at == EACH:
        await _call(stand, session, name, told)


async def _say(
    stand: Stand, session: aiohttp.ClientSession, key: str, statement: dict[str, Any], told: Told
) -> None:
    url = f"http://127.0.0.1:{stand.port}/feedback"
    told.sent += 1
    headers = {"Idempotency-Key": key}
    await _send(session, url, statement, headers, told)


async def _call(stand: Stand, session: aiohttp.ClientSession, name: str, told: Told) -> None:
    url = f"http://127.0.0.1:{stand.port}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": name}]}
    await _send(session, url, body, {"x-pawl-episode": name}, told)


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: dict[str, str],
    told: Told,
) -> None:
    """Send it until there is an answer that settles it."""
    while True:
        try:
            async with session.post(url, json=body, headers=headers) as reply:
                await reply.read()
                told.statuses[reply.status] += 1
                if reply.status < 500:
                    return
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            told.broken_off += 1
        await asyncio.sleep(RETRY_S)


async def _compared(url: str, policy: str, told: Told) -> dict[str, Any]:
    """Compare what is stored with what was said, in order: statements, and what they come to."""
    engine = make_engine(url)
    async with engine.connect() as connection:
        kept = await connection.execute(
            text("SELECT target, count(*) AS n FROM feedback GROUP BY target")
        )
        stored = {row.target: row.n for row in kept}
        scores = await connection.execute(
            text(
                "SELECT e.key, p.reward FROM episode_policies p"
                " JOIN episodes e ON e.id = p.episode_id WHERE p.policy = :policy"
            ),
            {"policy": policy},
        )
        rewards = {row.key: row.reward for row in scores}
        episodes = await read_episodes(connection, await episode_ids(connection))
    await engine.dispose()
    by_credit = {one.key: reward_of(one.feedback, SUM).value for one in episodes}
    wanted = {name: reward_of(said, SUM).value for name, said in told.of.items()}
    return {
        "stored": sum(stored.values()),
        "missing": sum(max(0, len(said) - stored.get(k, 0)) for k, said in told.of.items()),
        "twice": sum(max(0, stored.get(k, 0) - len(said)) for k, said in told.of.items()),
        "episodes": len(wanted),
        "without_reward": sum(value is None for value in wanted.values()),
        "returns_differ": _differing(wanted, by_credit),
        "scores_differ": _differing(wanted, rewards),
    }


def _differing(wanted: Mapping[str, float | None], found: Mapping[str, float | None]) -> list[str]:
    return [
        f"{name}: {found.get(name)} for {value}"
        for name, value in wanted.items()
        if name not in found or not _same(value, found[name])
    ]


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < 1e-12
