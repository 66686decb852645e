"""What is older than the days that are kept goes, of each of three tenants, through kills."""

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.removing import remove_outdated_records
from store import retaining, tombstones
from store.ids import lowest_id_at
from store.judging import Judgement, store_judgement
from store.link.outages import LOST_CALL
from store.records import CallRecord, FeedbackRecord, SpoolRecord
from store.retaining import LOST_CALLS, remove_some, tenant_sql
from store.tenants import DEFAULT, keyed_digests, scoped, tenant_of
from store.values.digests import PREFIX
from store.write.ingest import Ingester
from tests.integration.deleting.test_deleting import body, digest
from tests.integration.deleting.test_keeping_for_days import NOON, PARTITIONS, made
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.deleting import exported, places_with
from tests.support.ledger.sessions import until_idle
from tests.support.records import call, reward, tool_event

TENANTS = ("acme", "bee", DEFAULT)


def episode_of(tenant: str, number: int, days: Sequence[int], keep: int) -> list[SpoolRecord]:
    """Return an episode with two calls a day; what has to go says so in its words."""
    key, records = scoped(tenant, f"run-{number}"), list[CallRecord]()
    [told] = keyed_digests(tenant, [digest(PREFIX, f"run {number}")])
    for turn, days_ago in enumerate(days):
        word = f"{'kept' if days_ago <= keep else 'gone'} {tenant} "
        for again in range(2):
            place = (100 * number + 10 * turn + 2 * TENANTS.index(tenant)) * 2 + again
            records.append(
                call(
                    key,
                    task=scoped(tenant, "task"),
                    request=body("shared", *[word] * (again + 1)),
                    provides=(told,),
                    tool_events=(tool_event("ok", f"call_{number}"),),
                    **made(days_ago, place),
                )
            )
    said = [
        reward(0.5, episode=key, key=f"{key} said"),
        reward(0.5, episode=scoped(tenant, f"never {number}")),
    ]
    return [*records, *(stated(one, min(days), n) for n, one in enumerate(said, records[0].id.int))]


def stated(record: FeedbackRecord, days_ago: int, number: int) -> FeedbackRecord:
    """Make feedback as it is stated, so many days ago: all its ids are of its time."""
    at = NOON - timedelta(days=days_ago)
    made_then = UUID(int=lowest_id_at(at).int + number % 2**40)
    items = tuple(msgspec.structs.replace(item, id=made_then) for item in record.items)
    return msgspec.structs.replace(record, id=made_then, at=at, items=items)


def ledger(seed: int, keep: int) -> list[list[SpoolRecord]]:
    """Return the same episodes of three tenants, in any order."""
    dice = random.Random(seed)
    episodes = []
    for number in range(8):
        days = sorted({dice.choice((0, 1, 5, 9, 20, 35, 50)) for _ in range(dice.choice((1, 2)))})
        episodes += [episode_of(tenant, number, days[::-1], keep) for tenant in TENANTS]
    dice.shuffle(episodes)
    return episodes


async def judged(engine: AsyncEngine) -> None:
    """Have every episode judged, with a reason that names it."""
    async with engine.begin() as connection:
        for row in (await connection.execute(text("SELECT id, key FROM episodes"))).all():
            reason = f"judged {tenant_of(row.key)}"
            await store_judgement(
                connection,
                Judgement(
                    episode_id=row.id,
                    judge="j",
                    outcome="cannot_tell",
                    attempts=1,
                    last_call_at=NOON,
                    reason=reason,
                ),
            )


async def contents(engine: AsyncEngine) -> dict[str, dict[str, Any]]:
    return {tenant: await exported(engine, tenant) for tenant in TENANTS}


def expected(
    before: dict[str, Any], episodes: list[list[SpoolRecord]], keep: int
) -> dict[str, dict[str, list[str]]]:
    """Return the calls that each episode has left, of those that have any."""
    left: dict[str, dict[str, list[str]]] = {tenant: {} for tenant in TENANTS}
    named = [(tenant, name) for tenant in TENANTS for name in before[tenant]]
    for tenant, name in named:
        ids = {UUID(one["call"]) for one in before[tenant][name]["calls"]}
        calls = [r for episode in episodes for r in episode if r.id in ids]
        days = {r.id: (NOON - r.started_at).days for r in calls if isinstance(r, CallRecord)}
        kept = [str(one) for one, ago in days.items() if ago <= keep]
        if kept:
            left[tenant][name] = sorted(kept)
    return left


async def check(
    engine: AsyncEngine,
    before: dict[str, Any],
    episodes: list[list[SpoolRecord]],
    keep: int,
    reasons: Sequence[str],
) -> None:
    """Check that nothing of what had to go is left, and all else is as it was.

    What goes on is set aside for one of these reasons.
    """
    after, left = await contents(engine), expected(before, episodes, keep)
    for tenant in TENANTS:
        shown = {
            name: sorted(one["call"] for one in line["calls"])
            for name, line in after[tenant].items()
        }
        assert shown == left[tenant], tenant
        for name, line in after[tenant].items():
            if len(line["calls"]) == len(before[tenant][name]["calls"]):
                assert line == before[tenant][name]
            else:
                assert line["quarantined"] in reasons
        assert await places_with(engine, f"gone {tenant}") == []
        gone = sorted(before[tenant].keys() - after[tenant].keys())
        for name in gone[:2] if tenant != DEFAULT else ():
            assert await places_with(engine, scoped(tenant, name)) == []
            never = name.replace("run-", "never ")
            assert await places_with(engine, scoped(tenant, never)) == []


REMOVE = """
import asyncio, sys
from datetime import date
from proxy.ingester import removing
from store.database import make_engine

async def run():
    engine = make_engine(sys.argv[1])
    count = removing._count
    removing._count = lambda removed: (count(removed), print("step", file=sys.stderr))
    await removing.remove_outdated_records(engine, date.fromisoformat(sys.argv[2]))
    await engine.dispose()

asyncio.run(run())
"""


async def removed_until_killed(url: str, before: date, steps: int) -> None:
    """Remove in a process of its own, and kill it after the last of `steps` steps."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", REMOVE, url, before.isoformat()),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ,
    )
    assert process.stderr is not None
    for _ in range(steps):
        assert await process.stderr.readline() == b"step\n"
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.parametrize("keep", [7, 30])
async def test_outdated_episodes_are_removed_whole_and_others_kept_through_kills(
    engine: AsyncEngine, database_url: str, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    first_day = NOON.date() - timedelta(days=keep)
    # Many steps, each of few episodes.
    monkeypatch.setattr(retaining, "MOST_AT_ONCE", 3)
    episodes = ledger(keep, keep)
    for episode in episodes:
        await Ingester().store(engine, episode)
    await judged(engine)
    before = await contents(engine)
    assert {len(lines) for lines in before.values()} == {8}
    for steps in (1, 2):
        await removed_until_killed(database_url, first_day, steps)
        await until_idle(engine)
    for target, name in (
        (retaining, "_record_last_removed_day"),
        (retaining, "abandon_updates"),
        (retaining, "_drop_day"),
        (tombstones, "_forget"),
    ):
        for after in (False, True):
            with monkeypatch.context() as patch:
                killing(target, name, after=after)(patch)
                try:
                    await remove_some(engine, first_day)
                except Killed:
                    continue
    await remove_outdated_records(engine, first_day)
    await check(engine, before, episodes, keep, [LOST_CALLS])
    # What comes once more is not stored again, where it is outdated, and changes nothing else.
    ingester = Ingester()
    for episode in episodes:
        await ingester.store(engine, [one for one in episode if isinstance(one, CallRecord)])
    await remove_outdated_records(engine, first_day)
    # Each call that is left out leaves a gap.
    await check(engine, before, episodes, keep, [LOST_CALLS, LOST_CALL])
    async with engine.connect() as connection:
        days = (ago for ago in (0, 1, 5, 9, 20, 35, 50) if ago <= keep)
        there = await connection.scalar(text(PARTITIONS))
        assert 0 < there <= len(list(days))


async def test_sql_and_python_read_the_same_tenant_from_a_scoped_name(engine: AsyncEngine) -> None:
    names = [
        "",
        "e",
        "\x1fe",
        "a\x1fe",
        "a\x1f",
        "a\x1fb\x1fc",
        "\x1fdeleted:1",
        "\x1f\x1f",
        "é\x1fe",
    ]
    async with engine.connect() as connection:
        for name in names:
            query = text(f"SELECT {tenant_sql('CAST(:name AS text)')}")
            assert await connection.scalar(query, {"name": name}) == tenant_of(name)
