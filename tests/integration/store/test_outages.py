"""Recording outages: episodes under way in one are set aside, in any order of arrival."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.claim_query import ClaimRule, waiting_updates
from store.driver import Driver
from store.ids import lowest_id_at, new_id
from store.link import settle
from store.link.joins import DOUBTFUL_CALL
from store.link.outages import EPISODES_IN_OUTAGE, IN_OUTAGE, LOST_CALL, SLACK
from store.records import CallRecord, GapRecord, OutageRecord, SpoolRecord
from store.values.digests import PREFIX
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.integration.store.test_joins import digest, own
from tests.support.faults.killing import Killed
from tests.support.ledger.any_order import same_in_any_order
from tests.support.ledger.episodes import store
from tests.support.records import START, call, reward

HOUR = timedelta(hours=1)


def at(hours: float, episode: str, **changes: Any) -> CallRecord:
    """A call so many hours after START."""
    began = START + hours * HOUR
    made = UUID(int=lowest_id_at(began).int + new_id().int % 2**62)
    return msgspec.structs.replace(call(episode, **changes), id=made, started_at=began)


def outage(since: float, until: float, name: UUID | None = None) -> OutageRecord:
    """An outage from so many hours after START to so many."""
    return OutageRecord(id=name or new_id(), since=START + since * HOUR, until=START + until * HOUR)


async def reasons(engine: AsyncEngine) -> dict[str, str | None]:
    """Why each episode that stands for itself is set aside."""
    async with engine.connect() as connection:
        query = "SELECT key, quarantined_reason FROM episodes WHERE root IS NULL"
        return {row[0]: row[1] for row in await connection.execute(text(query))}


@pytest.mark.parametrize("first", ["calls", "outage"])
async def test_only_episodes_under_way_in_a_recording_outage_are_quarantined(
    engine: AsyncEngine, first: str
) -> None:
    calls = [
        *(at(-9, "around"), at(9, "around"), at(0.05, "within")),
        *(at(-0.9, "just before"), at(-1.1, "before"), at(-9, "long before")),
        *(at(1.0, "just after"), at(1.2, "after"), at(9, "long after")),
    ]
    parts: list[Sequence[SpoolRecord]] = [calls, [outage(0, 0.1)]]
    for records in parts if first == "calls" else reversed(parts):
        await store(engine, *records)
    aside = {"around", "within", "just before", "just after"}
    assert await reasons(engine) == {
        one.episode: IN_OUTAGE if one.episode in aside else None for one in calls
    }


async def test_late_call_puts_its_episode_into_an_earlier_recording_outage(
    engine: AsyncEngine,
) -> None:
    await store(engine, at(-9, "e"))
    await store(engine, outage(0, 0.1))
    assert await reasons(engine) == {"e": None}
    await store(engine, at(9, "e"))
    assert await reasons(engine) == {"e": IN_OUTAGE}


async def test_repeated_outage_record_extends_the_outage_and_never_shortens_it(
    engine: AsyncEngine,
) -> None:
    name = new_id()
    await store(engine, outage(0, 1, name), at(4, "e"))
    assert await reasons(engine) == {"e": None}
    await store(engine, outage(0, 4, name))
    await store(engine, outage(0, 2, name), at(4.5, "later"))
    assert await reasons(engine) == {"e": IN_OUTAGE, "later": IN_OUTAGE}


async def test_episode_quarantined_by_an_outage_does_not_count_as_waiting(
    engine: AsyncEngine,
) -> None:
    rule = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=1.0)
    await store(engine, at(0, "e"), reward(1.0, episode="e"))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        assert await waiting_updates(connection, rule) == 1
    await store(engine, outage(0, 0))
    async with engine.begin() as connection:
        assert await waiting_updates(connection, rule) == 0


@pytest.mark.parametrize("mark", ["gap", "outage"])
async def test_a_joined_episode_is_quarantined_with_its_part(
    engine: AsyncEngine, mark: str
) -> None:
    """The mark comes when the parts are joined already."""
    parts = [own("a", told=["1"]), own("b", repeats=["1"])]
    began = [msgspec.structs.replace(at(n, "x"), episode="x") for n in (-9, 0)]
    await store(
        engine,
        *(
            msgspec.structs.replace(part, id=when.id, started_at=when.started_at)
            for part, when in zip(parts, began, strict=True)
        ),
    )
    assert await reasons(engine) == {"a": None}
    gap = GapRecord(id=new_id(), episodes=("b",))
    await store(engine, gap if mark == "gap" else outage(0, 0))
    assert await reasons(engine) == {"a": DOUBTFUL_CALL}


def scenario(dice: random.Random) -> list[SpoolRecord]:
    """Calls over two days, some of which others repeat; marks by name and by time; a reward."""
    digests = [digest(PREFIX, str(number)) for number in range(5)]
    keys = [f"k{number}" for number in range(8)]
    records: list[SpoolRecord] = []
    for _ in range(14):
        is_own = dice.random() < 0.4
        key = f"own-{len(records)}" if is_own else dice.choice(keys)
        records.append(
            at(
                dice.uniform(-24, 24),
                key,
                method="own" if is_own else "header",
                provides=tuple(dice.sample(digests, dice.randrange(2))),
                needs=tuple(dice.sample(digests, 1)) if is_own else (),
                confidence=dice.choice(["certain"] * 9 + ["doubtful"]),
            )
        )
    for _ in range(2):
        name, since = new_id(), dice.uniform(-24, 24)
        records += [outage(since, since + dice.uniform(0, 2), name) for _ in range(2)]
    records += [GapRecord(id=new_id(), episodes=(dice.choice(keys),)) for _ in range(2)]
    return [*records, reward(0.5, episode=dice.choice(keys))]


async def claimable(engine: AsyncEngine) -> list[Any]:
    query = """
        SELECT e.key, e.doubtful, e.quarantined_reason, r.key AS root, p.policy, p.claimable
        FROM episodes e LEFT JOIN episodes r ON r.id = e.root
            LEFT JOIN episode_policies p ON p.episode_id = e.id
        ORDER BY e.key, p.policy
    """
    async with engine.connect() as connection:
        outages = await connection.execute(text("SELECT * FROM recording_outages ORDER BY id"))
        return [*outages, *await connection.execute(text(query))]


@pytest.mark.parametrize("seed", range(12))
async def test_records_in_any_order_batches_and_repetition_quarantine_the_same_episodes(
    engine: AsyncEngine, seed: int
) -> None:
    dice = random.Random(seed)
    await same_in_any_order(engine, scenario(dice), dice, claimable, "recording_outages")


async def test_concurrent_drainers_quarantine_every_episode_in_a_recording_outage(
    engine: AsyncEngine,
) -> None:
    calls = [at(number / 100, f"e{number}") for number in range(60)]
    outages = [outage(0, number / 100, new_id()) for number in range(20)]

    async def drain(records: Sequence[SpoolRecord]) -> None:
        ingester = Ingester()
        for record in records:
            await ingester.store(engine, [record])

    await asyncio.gather(drain(calls[:30]), drain(outages), drain(calls[30:]))
    assert set((await reasons(engine)).values()) == {IN_OUTAGE}


async def test_outage_query_reads_no_row_of_an_episode_far_from_any_recording_outage(
    engine: AsyncEngine,
) -> None:
    await store(engine, at(0, "e"), *(outage(-9 - number, -9 - number) for number in range(20)))
    async with engine.connect() as connection:
        [found] = (await connection.execute(text("SELECT id, first_call_id FROM episodes"))).all()
        driver: Driver = (await connection.get_raw_connection()).driver_connection
        query = f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {EPISODES_IN_OUTAGE}"
        plan = [row[0] for row in await driver.fetch(query, [found.id], found[1], START)]
    assert "One-Time Filter" in "\n".join(plan)
    assert [line for line in plan if "on episodes" in line and "never executed" not in line] == []


async def written_by(engine: AsyncEngine) -> dict[str, str]:
    """The transaction that wrote each episode last."""
    async with engine.connect() as connection:
        found = await connection.execute(text("SELECT key, xmin::text FROM episodes"))
        return {row[0]: row[1] for row in found}


async def test_long_outage_is_applied_in_transactions_of_bounded_size(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.link.outages.MOST_QUARANTINED", 3)
    await store(engine, *(at(number, f"e{number}") for number in range(10)), at(99, "after"))
    # It overlaps another one, which is stored with it.
    await store(engine, outage(0, 9), outage(2, 4))
    assert await reasons(engine) == {"after": None} | {f"e{n}": IN_OUTAGE for n in range(10)}
    written = await written_by(engine)
    written.pop("after")
    assert max(Counter(written.values()).values()) <= 3


async def test_outage_half_applied_by_a_killed_ingester_is_applied_whole(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.link.outages.MOST_QUARANTINED", 3)
    await store(engine, *(at(number, f"e{number}") for number in range(10)))
    told = outage(0, 9)
    real, batches = settle.quarantine_for_outage, 0

    async def dying(driver: Driver, episodes: Sequence[UUID]) -> None:
        nonlocal batches
        batches += 1
        if batches == 2:
            raise Killed
        await real(driver, episodes)

    with monkeypatch.context() as patched:
        patched.setattr(settle, "quarantine_for_outage", dying)
        with pytest.raises(Killed):
            await store(engine, told)
    assert list((await reasons(engine)).values()).count(IN_OUTAGE) == 3
    await store(engine, told)
    assert set((await reasons(engine)).values()) == {IN_OUTAGE}


def test_quarantine_reason_outage_yields_to_any_other_reason() -> None:
    """PostgreSQL's LEAST takes the lesser text."""
    assert max(IN_OUTAGE, LOST_CALL, DOUBTFUL_CALL) == IN_OUTAGE
    assert timedelta(0) < SLACK
