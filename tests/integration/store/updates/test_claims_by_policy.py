"""What policies may claim and have consumed, under any order of arrival and any kill."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.claims import NON_FINITE, Outcome, end_unusable_claim
from store.records import SpoolRecord
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.any_order import same_in_any_order
from tests.support.records import call, reward

POLICIES: Final = ("writes", "checks")
AGENTS: Final[tuple[dict[str, Any], ...]] = (
    {"agent": "writer", "policy": "writes"},
    {"agent": "checker", "policy": "checks"},
    {"agent": "rewriter", "policy": None, "policy_version": None, "trainable": False}
    | {"reason": "no_policy"},
)
# What a part has been told of the rewards of its whole says nothing: it is never claimed.
OF_POLICIES = """
    SELECT e.key, p.policy, p.own_version, p.claimable, w.*
    FROM episode_policies p JOIN episodes e ON e.id = p.episode_id LEFT JOIN LATERAL (
        SELECT p.version, p.task, p.scored_at, p.call_scored_at, p.reward, p.failed,
            p.last_call_at
        WHERE e.root IS NULL) w ON true
    ORDER BY 1, 2
"""


def scenario(dice: random.Random) -> list[SpoolRecord]:
    """Episodes of three agents, some in parts that are to be joined, some in doubt."""
    records: list[SpoolRecord] = []
    for number in range(14):
        key = f"k{dice.randrange(6)}"
        is_first = not any(getattr(record, "episode", None) == key for record in records)
        agent = dice.choice(AGENTS)
        if agent["policy"] is not None:
            agent = agent | {"policy_version": dice.randrange(3)}
        http_status = dice.choice([200, 200, 400])
        records.append(
            call(
                key,
                **agent,
                http_status=http_status,
                method="own" if is_first and key > "k1" else "tool_call",
                task=dice.choice([None, "named"]),
                response_id=f"r{number}",
                provides=(bytes([dice.randrange(5)]) * 16,),
                needs=(bytes([dice.randrange(5)]) * 16,) if is_first and key > "k1" else (),
            )
        )
    records += [
        reward(dice.choice([0.5, 1.0]), at=n // 2, episode=f"k{dice.randrange(6)}")
        for n in range(4)
    ]
    return [*records, *(reward(0.2, at=n, response=f"r{dice.randrange(14)}") for n in range(2))]


async def found(engine: AsyncEngine, query: str = OF_POLICIES) -> list[tuple[Any, ...]]:
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(text(query))]


@pytest.mark.parametrize("seed", range(16))
async def test_records_in_any_order_batches_and_repetition_give_the_same_claims(
    engine: AsyncEngine, seed: int
) -> None:
    dice = random.Random(seed)
    assert await same_in_any_order(engine, scenario(dice), dice, found, "updates")


# Kills

SPENT = """
    SELECT e.key, p.policy, count(c.update_id), bool_and(c.update_id = p.claimed_by)
    FROM episode_policies p JOIN episodes e ON e.id = p.episode_id
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    GROUP BY 1, 2 ORDER BY 1, 2
"""
OTHERS = """
    SELECT p.*, c.update_id, c.trained, c.reason FROM episode_policies p
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    WHERE p.policy <> '{policy}' ORDER BY p.episode_id, p.policy
"""


class Trainer:
    """One policy's trainer, which may be killed at any await and then begins again."""

    def __init__(self, engine: AsyncEngine, policy: str, dice: random.Random) -> None:
        self._engine = engine
        self._policy = policy
        self._dice = dice
        self._rule = ClaimRule(policy=policy, group_size=1, groups=3, max_age_s=1e-6, fewest=1)

    async def live(self) -> bool:
        """Free what the trainer before held, then update; return whether nothing was left."""
        async with self._engine.begin() as connection:
            running = await claims.running_update(connection, self._policy)
            if running is not None:
                await claims.release(connection, running, "killed")
        while True:
            async with self._engine.begin() as connection:
                update_id = await claims.claim(connection, self._rule, 0, {})
            if update_id is None:
                return True
            async with self._engine.connect() as connection:
                claim = await claims.load_claim(connection, update_id)
            ids = [episode.id for group in claim.groups for episode in group.episodes]
            async with self._engine.begin() as connection:
                if self._dice.random() < 0.2:
                    await end_unusable_claim(connection, update_id, {ids[0]: "why"}, NON_FINITE)
                    continue
                await claims.record_update(
                    connection,
                    update_id,
                    [Outcome(episode_id=one, trained=True) for one in ids],
                    {},
                    policy=self._policy,
                    version=None,
                    adapter_path=None,
                )


async def until_killed(work: Callable[[], Awaitable[bool]], after_s: float) -> bool:
    """Run a trainer's life for so long; return whether it came to its end."""
    task = asyncio.ensure_future(work())
    done, _ = await asyncio.wait([task], timeout=after_s)
    if not done:
        task.cancel()
    await asyncio.wait([task])
    return not task.cancelled() and task.result()


def episodes_of_three(count: int) -> list[list[SpoolRecord]]:
    """Episodes of all agents, a batch each, whose first call is another agent's in turn."""
    batches: list[list[SpoolRecord]] = []
    for number in range(count):
        key = f"e{number:03}"
        order = AGENTS[number % 3 :] + AGENTS[: number % 3]
        calls: list[SpoolRecord] = [call(key, task=f"t{number % 5}", **agent) for agent in order]
        batches.append([*calls, reward(float(number % 2), episode=key)])
    return batches


@pytest.mark.parametrize("seed", range(3))
async def test_each_policy_consumes_each_episode_once_through_kills(
    engine: AsyncEngine, seed: int
) -> None:
    """The episodes arrive meanwhile, their calls and rewards in any order and more than once."""
    dice = random.Random(seed)
    async with engine.begin() as connection:
        for policy in POLICIES:
            await ensure_base(connection, policy)
    records = [record for batch in episodes_of_three(20) for record in batch]
    dice.shuffle(records)

    async def arrive() -> None:
        ingester = Ingester()
        for start in range(0, len(records), 5):
            await ingester.store(engine, records[start : start + 5])
            await ingester.store(engine, dice.sample(records[: start + 5], 2))

    async def train(policy: str, dice: random.Random) -> int:
        trainer, kills = Trainer(engine, policy, dice), 0
        while not arriving.done() or kills < 70:
            kills += not await until_killed(trainer.live, dice.uniform(0.0, 0.03))
        assert await trainer.live()
        return kills

    arriving = asyncio.create_task(arrive())
    kills = await asyncio.gather(*[train(p, random.Random(f"{p}{seed}")) for p in POLICIES])
    await arriving
    assert min(kills) >= 70
    expected = [(f"e{n:03}", policy) for n in range(20) for policy in sorted(POLICIES)]
    assert await found(engine, SPENT) == [(*pair, 1, True) for pair in expected]


async def test_policys_updates_change_nothing_of_another_policy(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        for policy in POLICIES:
            await ensure_base(connection, policy)
    for batch in episodes_of_three(12):
        await Ingester().store(engine, batch)
    for policy in POLICIES:
        before = await found(engine, OTHERS.format(policy=policy))
        assert await Trainer(engine, policy, random.Random(1)).live()
        assert await found(engine, OTHERS.format(policy=policy)) == before
    assert {row[2:] for row in await found(engine, SPENT)} == {(1, True)}
