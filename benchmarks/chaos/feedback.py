"""No feedback is lost or mixed up: send thousands of statements while the proxy is killed.

Each client works on an episode of its own: it makes one call, before, amid or after its statements
about three metrics (values, changed values, withdrawals). Each statement is sent again until it is
answered, and some are repeated later, with the same idempotency key. So a client knows which
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

from benchmarks import wire
from store.database import make_engine
from store.link.claimable import set_reward_rule
from store.read.episodes import read_episodes
from store.records import Feedback
from store.selecting import select_episodes
from store.values.rewards import RewardRule, RewardTerm, reward_of
from store.version_states import ensure_base
from tests.support.faults.ledger import Scrapes, drained
from tests.support.faults.load import fetch
from tests.support.faults.stand import PARTS, Stand

STATEMENTS_AN_EPISODE: Final = 20
AT_ONCE: Final = 16
STATEMENTS_A_KILL: Final = 250
RETRY_S: Final = 0.05
PAUSE_S: Final = (0.3, 2.0)
AWAY_S: Final = 5.0
DRAIN_S: Final = 300.0
# The share of accepted statements that are sent again later.
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
class Client:
    """Sends statements about episodes, one after another.

    Attributes:
        stated: the accepted feedback on each episode, in order.
        sent: number of statements sent, with repeats.
        repeated: number of statements sent a second time on purpose.
        statuses: number of replies by status; 0: broken off.
    """

    stand: Stand
    session: aiohttp.ClientSession
    stated: dict[str, list[Feedback]] = field(default_factory=dict)
    sent: int = 0
    repeated: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    async def state_all(self, episode: str, dice: random.Random) -> None:
        """Send all statements about one episode, and make its call before, amid or after them."""
        sent: list[tuple[str, dict[str, Any]]] = []
        call_at = dice.choice([0, dice.randrange(STATEMENTS_AN_EPISODE), STATEMENTS_AN_EPISODE])
        stated = self.stated.setdefault(episode, [])
        for number in range(STATEMENTS_AN_EPISODE):
            if number == call_at:
                await self.make_call(episode)
            metric = dice.choice(list(VALUES))
            value = dice.choice(VALUES[metric])
            statement: dict[str, Any] = {"metric": metric, "episode": episode}
            statement |= {"withdrawn": True} if value is None else {"value": value}
            sent.append((f"{episode}/{number}", statement))
            await self.post_statement(*sent[-1])
            at = START + timedelta(seconds=number)
            stated.append(Feedback(metric=metric, value=value, at=at))
            if dice.random() < AGAIN:
                self.repeated += 1
                await self.post_statement(*dice.choice(sent))
        if call_at == STATEMENTS_AN_EPISODE:
            await self.make_call(episode)

    async def post_statement(self, key: str, statement: dict[str, Any]) -> None:
        self.sent += 1
        await self._send("/feedback", statement, {"Idempotency-Key": key})

    async def make_call(self, episode: str) -> None:
        body = {"model": wire.MODEL, "messages": [{"role": "user", "content": episode}]}
        await self._send(wire.CHAT, body, {"x-pawl-episode": episode})

    async def _send(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Send the request until it gets an answer below status 500."""
        url = f"http://127.0.0.1:{self.stand.port}{path}"
        status = 0
        while not 0 < status < 500:
            try:
                async with self.session.post(url, json=body, headers=headers) as reply:
                    await reply.read()
                    status = reply.status
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                status = 0
            self.statuses[status] += 1
            if not 0 < status < 500:
                await asyncio.sleep(RETRY_S)


async def check_feedback(stand: Stand, statements: int, seed: int) -> dict[str, Any]:
    """Send `statements` under kills and an outage; compare them with the stored feedback."""
    await stand.ready()
    dice = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        policy = await _begin_policy(stand, session)
        client = Client(stand, session)
        kills = max(1, statements // STATEMENTS_A_KILL)
        killing = asyncio.create_task(_kill(stand, kills, random.Random(seed + 1)))
        queue = [f"said-{number}" for number in range(statements // STATEMENTS_AN_EPISODE)]

        async def work(own: random.Random) -> None:
            while queue:
                await client.state_all(queue.pop(), own)

        await asyncio.gather(*(work(random.Random(dice.random())) for _ in range(AT_ONCE)))
    killed = await killing
    drain_s = await drained(stand.admin, Scrapes(), within_s=DRAIN_S)
    compared = await _compare_stored(stand.url, policy, client.stated)
    await asyncio.to_thread(stand.stop)
    return {
        "statements": sum(map(len, client.stated.values())),
        "sent": client.sent,
        "sent_again": client.repeated,
        "statuses": dict(client.statuses),
        "kills": dict(killed),
        "away_s": AWAY_S,
        "drain_s": drain_s,
        **compared,
    }


async def _begin_policy(stand: Stand, session: aiohttp.ClientSession) -> str:
    """Make the served model a policy with the rule SUM; return its name once calls belong to it."""
    models = json.loads((await fetch(stand.port, "/v1/models")).body)
    policy: str = models["data"][0]["id"]
    engine = make_engine(stand.url)
    async with engine.begin() as connection:
        await ensure_base(connection, policy)
        await set_reward_rule(connection, policy, SUM)
    is_known = text("SELECT EXISTS (SELECT FROM episode_policies)")
    async with engine.connect() as connection:
        while not await connection.scalar(is_known):
            await Client(stand, session).make_call("before")
            await connection.rollback()
            await asyncio.sleep(RETRY_S)
    await engine.dispose()
    return policy


async def _kill(stand: Stand, kills: int, dice: random.Random) -> Counter[str]:
    """Kill processes at random moments; half-way stop the database for `AWAY_S` seconds."""
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
    return killed


async def _compare_stored(
    url: str, policy: str, stated: Mapping[str, list[Feedback]]
) -> dict[str, Any]:
    """Compare the stored feedback with `stated`: number of statements, and resulting rewards."""
    engine = make_engine(url)
    async with engine.connect() as connection:
        counts = text("SELECT target, count(*) AS n FROM feedback GROUP BY target")
        stored = {row.target: row.n for row in await connection.execute(counts)}
        scores = text(
            "SELECT e.key, p.reward FROM episode_policies p"
            " JOIN episodes e ON e.id = p.episode_id WHERE p.policy = :policy"
        )
        rows = await connection.execute(scores, {"policy": policy})
        rewards = {row.key: row.reward for row in rows}
        episodes = await read_episodes(connection, await select_episodes(connection))
    await engine.dispose()
    by_credit = {one.key: reward_of(one.feedback, SUM).value for one in episodes}
    wanted = {name: reward_of(own, SUM).value for name, own in stated.items()}
    return {
        "stored": sum(stored.values()),
        "missing": sum(max(0, len(own) - stored.get(k, 0)) for k, own in stated.items()),
        "twice": sum(max(0, stored.get(k, 0) - len(own)) for k, own in stated.items()),
        "episodes": len(wanted),
        "without_reward": sum(value is None for value in wanted.values()),
        "returns_differ": _differences(wanted, by_credit),
        "scores_differ": _differences(wanted, rewards),
    }


def _differences(
    wanted: Mapping[str, float | None], stored: Mapping[str, float | None]
) -> list[str]:
    return [
        f"{name}: {stored.get(name)} for {value}"
        for name, value in wanted.items()
        if name not in stored or not _is_same(value, stored[name])
    ]


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < 1e-12
