"""Each tenant's records are kept for its own days, under the same names and with kills between."""

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.removing import remove_all
from store import retaining, tombstones
from store.ids import lowest_id_at
from store.judging import Judgement, note
from store.keep_days import Periods
from store.link.outages import LOST_CALL
from store.records import CallRecord, FeedbackRecord, SpoolRecord
from store.retaining import LOST_CALLS, remove_some, tenant_in
from store.tenants import DEFAULT, own_digests, scoped, tenant_of
from store.values.digests import PREFIX
from store.write.ingest import Ingester
from tests.integration.deleting.test_deleting import body, digest
from tests.integration.deleting.test_keeping_for_days import NOON, PARTITIONS, made
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.deleting import exported, places_with
from tests.support.ledger.sessions import until_idle
from tests.support.records import call, reward, tool_event

TENANTS = ("acme", "bee", DEFAULT)
# `default` is not named: its days are everybody's.
DAYS = {"acme": 7, "bee": 30}
SETTINGS = {"others for ever": Periods(of=DAYS), "others for 40": Periods(others=40, of=DAYS)}


def is_kept(tenant: str, days_ago: int, periods: Periods) -> bool:
    days = periods.of.get(tenant, periods.others)
    return days is None or days_ago <= days


def episode_of(
    tenant: str, number: int, days: Sequence[int], periods: Periods
) -> list[SpoolRecord]:
    """Return an episode with two calls a day; what has to go says so in its words."""
    key, records = scoped(tenant, f"run-{number}"), list[CallRecord]()
    [told] = own_digests(tenant, [digest(PREFIX, f"run {number}")])
    for turn, days_ago in enumerate(days):
        word = f"{'kept' if is_kept(tenant, days_ago, periods) else 'gone'} {tenant} "
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


def ledger(seed: int, periods: Periods) -> list[list[SpoolRecord]]:
    """Return the same episodes of three tenants, in any order."""
    dice = random.Random(seed)
    episodes = []
    for number in range(8):
        days = sorted({dice.choice((0, 1, 5, 9, 20, 35, 50)) for _ in range(dice.choice((1, 2)))})
        episodes += [episode_of(tenant, number, days[::-1], periods) for tenant in TENANTS]
    dice.shuffle(episodes)
    return episodes


async def judged(engine: AsyncEngine) -> None:
    """Have every episode judged, with a reason that names it."""
    async with engine.begin() as connection:
        for row in (await connection.execute(text("SELECT id, key FROM episodes"))).all():
            reason = f"judged {tenant_of(row.key)}"
            await note(
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
    before: dict[str, Any], episodes: list[list[SpoolRecord]], periods: Periods
) -> dict[str, dict[str, list[str]]]:
    """Return the calls that each episode has left, of those that have any."""
    left: dict[str, dict[str, list[str]]] = {tenant: {} for tenant in TENANTS}
    named = [(tenant, name) for tenant in TENANTS for name in before[tenant]]
    for tenant, name in named:
        ids = {UUID(one["call"]) for one in before[tenant][name]["calls"]}
        calls = [r for episode in episodes for r in episode if r.id in ids]
        days = {r.id: (NOON - r.started_at).days for r in calls if isinstance(r, CallRecord)}
        kept = [str(one) for one, ago in days.items() if is_kept(tenant, ago, periods)]
        if kept:
            left[tenant][name] = sorted(kept)
    return left


async def check(
    engine: AsyncEngine,
    before: dict[str, Any],
    episodes: list[list[SpoolRecord]],
    periods: Periods,
    reasons: Sequence[str],
) -> None:
    """Check that nothing of what had to go is left, and all else is as it was.

    What goes on is set aside for one of these reasons.
    """
    after, left = await contents(engine), expected(before, episodes, periods)
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
from proxy.ingester import removing as outdated
from store.database import make_engine
from store.keep_days import read_periods

async def run():
    engine = make_engine(sys.argv[1])
    count = outdated._count
    outdated._count = lambda removed: (count(removed), print("step", flush=True))
    cuts = read_periods(sys.argv[2]).cuts(date.fromisoformat(sys.argv[3]))
    await outdated.remove_all(engine, cuts)
    await engine.dispose()

asyncio.run(run())
"""


async def removed_until_killed(url: str, periods: Periods, steps: int) -> None:
    """Remove in a process of its own, and kill it once so many steps are done."""
    said = ",".join(
        [str(periods.others)] * (periods.others is not None)
        + [f"{tenant}={days}" for tenant, days in periods.of.items()]
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", REMOVE, url, said, NOON.date().isoformat()),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ,
    )
    assert process.stdout is not None
    for _ in range(steps):
        await process.stdout.readline()
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.parametrize("setting", SETTINGS)
async def test_each_tenants_records_go_when_its_days_are_over(
    engine: AsyncEngine, database_url: str, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    periods = SETTINGS[setting]
    # Many steps, each of few episodes.
    monkeypatch.setattr(retaining, "MOST", 3)
    episodes = ledger(len(setting), periods)
    for episode in episodes:
        await Ingester().store(engine, episode)
    await judged(engine)
    before = await contents(engine)
    assert {len(lines) for lines in before.values()} == {8}
    for steps in (1, 2):
        await removed_until_killed(database_url, periods, steps)
        await until_idle(engine)
    cuts = periods.cuts(NOON.date())
    for target, name in (
        (retaining, "_remove_calls"),
        (retaining, "end_updates"),
        (tombstones, "_forget"),
    ):
        for after in (False, True):
            with monkeypatch.context() as patch:
                killing(target, name, after=after)(patch)
                try:
                    await remove_some(engine, cuts)
                except Killed:
                    continue
    await remove_all(engine, cuts)
    await check(engine, before, episodes, periods, [LOST_CALLS])
    # What comes once more is not stored again, where it is outdated, and changes nothing else.
    ingester = Ingester()
    for episode in episodes:
        await ingester.store(engine, [one for one in episode if isinstance(one, CallRecord)])
    await remove_all(engine, cuts)
    # Each call that is left out leaves a gap.
    await check(engine, before, episodes, periods, [LOST_CALLS, LOST_CALL])
    async with engine.connect() as connection:
        oldest = 50 if periods.others is None else 35
        days = (ago for ago in (0, 1, 5, 9, 20, 35, 50) if ago <= oldest)
        there = await connection.scalar(text(PARTITIONS))
        assert 0 < there <= len(list(days))


async def test_a_late_record_is_left_out_for_the_tenant_alone_whose_day_is_over(
    engine: AsyncEngine,
) -> None:
    cuts = SETTINGS["others for ever"].cuts(NOON.date())
    await Ingester().store(
        engine, [call(scoped(tenant, "e"), **made(9, n)) for n, tenant in enumerate(TENANTS)]
    )
    await remove_all(engine, cuts)
    late = [call(scoped(tenant, "late"), **made(9, 9 + n)) for n, tenant in enumerate(TENANTS)]
    new = [call(scoped(tenant, "late"), **made(0, n)) for n, tenant in enumerate(TENANTS)]
    assert await Ingester().store(engine, [*late, *new]) == {late[0].id}
    found = await contents(engine)
    assert {one: sorted(lines) for one, lines in found.items()} == {
        "acme": ["late"],
        "bee": ["e", "late"],
        DEFAULT: ["e", "late"],
    }
    # It goes on without the call that was left out.
    assert [bool(lines["late"].get("quarantined")) for lines in found.values()] == [
        True,
        False,
        False,
    ]


async def test_one_step_is_bounded(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.retaining.MOST_CALLS", 4)
    cuts = SETTINGS["others for ever"].cuts(NOON.date())
    calls = [
        call(scoped("acme", f"e{number}"), request=body(f"{number}"), **made(9, 10 * number + turn))
        for number in range(5)
        for turn in range(6 if number == 2 else 2)
    ]
    await Ingester().store(engine, calls)
    removed = []
    after = UUID(int=0)
    while (step := await remove_some(engine, cuts, after)) is not None:
        removed.append((step.episodes, step.calls))
        after = step.last
    assert sum(episodes for episodes, _ in removed) == 5
    assert sum(count for _, count in removed) == len(calls)
    assert all(count <= 4 or episodes == 1 for episodes, count in removed)


async def test_the_database_knows_tenants_as_names_do(engine: AsyncEngine) -> None:
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
            query = text(f"SELECT {tenant_in('CAST(:name AS text)')}")
            assert await connection.scalar(query, {"name": name}) == tenant_of(name)
