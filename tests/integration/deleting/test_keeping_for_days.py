"""`PAWL_KEEP_DAYS`: older episodes and days are removed, and what goes on stays readable."""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester import removing as outdated
from proxy.ingester.ingester import repeat
from proxy.ingester.removing import (
    DeadLetter,
    remove_old_letters,
    remove_outdated_records,
    write_dead_letters,
)
from proxy.spool.segments import Frame, encode_payload
from store.claim_query import ClaimRule
from store.ids import lowest_id_at, time_of
from store.records import CallRecord, GapRecord
from store.retaining import LOST_CALLS, RETAIN_LOCK, remove_some
from store.tenants import scoped
from store.values.digests import PREFIX
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.integration.deleting.test_deleting import body, digest
from tests.support.ledger.deleting import exported, places_with
from tests.support.ledger.totals import totals
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, captured, reward
from tests.support.waiting import awaited

NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
BEFORE = NOON.date() - timedelta(days=2)
RULE = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=1e9)
PARTITIONS = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'transitions'::regclass"


def made(days_ago: int, number: int) -> dict[str, Any]:
    """Fields of a call from noon so many days ago."""
    began = NOON - timedelta(days=days_ago)
    return {"id": UUID(int=lowest_id_at(began).int + number), "started_at": began}


def thread(key: str, turns: int, first_day: int) -> list[CallRecord]:
    """A call a day, each with all that was said before."""
    return [
        call(
            key,
            request=body(*[f"{key} {n}" for n in range(turn + 1)]),
            **made(first_day - turn, turn),
        )
        for turn in range(turns)
    ]


async def rows(engine: AsyncEngine, query: str) -> list[Any]:
    async with engine.connect() as connection:
        return list((await connection.execute(text(query))).scalars())


async def test_outdated_episodes_and_day_partitions_are_removed_and_newer_episodes_stay(
    engine: AsyncEngine,
) -> None:
    ingester = Ingester()
    old = [
        call("old 1", request=body("canary 1"), **made(9, 1)),
        call("old 1", request=body("canary 1", "canary 2"), **made(9, 2)),
        call("old 2", request=body("canary 3"), provides=(digest(PREFIX, "p"),), **made(3, 3)),
    ]
    new = [call("new", request=body("new"), **made(2, 4)), *thread("now", 2, 1)]
    said = [reward(1.0, episode="old 1"), reward(1.0, episode="canary never came")]
    await ingester.store(engine, [*old, *new, *said, reward(0.5, episode="new")])
    before = await exported(engine)
    await remove_outdated_records(engine, BEFORE)
    after = await exported(engine)
    assert after == {key: before[key] for key in ("new", "now")}
    assert await places_with(engine, "canary") == []
    assert await places_with(engine, "old 1") == []
    # The reward's time in these tests is long past, and its episode goes on.
    assert await rows(engine, "SELECT target FROM feedback") == ["new"]
    assert await rows(engine, PARTITIONS) == [3]
    assert await rows(engine, "SELECT sum(calls) FROM dropped_days") == [3]
    # What is stored late is not stored again.
    assert await ingester.store(engine, [*old, *new]) == {record.id for record in old}
    await remove_outdated_records(engine, BEFORE)
    assert await exported(engine) == after


async def test_episode_whose_oldest_calls_were_removed_is_readable_and_quarantined(
    engine: AsyncEngine,
) -> None:
    calls = thread("long", 4, 4)
    same_day = call("long", request=body("long 0", "again"), **made(2, 9))
    await Ingester().store(engine, [*calls, same_day, reward(1.0, episode="long")])
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    claim = await claimed(engine, RULE)
    assert claim is not None
    await remove_outdated_records(engine, BEFORE)
    line = (await exported(engine))["long"]
    assert line["quarantined"] == LOST_CALLS
    kept = [str(one.id) for one in (*calls[2:], same_day)]
    assert sorted(shown["call"] for shown in line["calls"]) == sorted(kept)
    assert await rows(engine, "SELECT state FROM updates") == ["abandoned"]
    assert await claimed(engine, RULE) is None


async def aside(engine: AsyncEngine) -> int:
    [found] = await rows(engine, "SELECT count(*) FROM episodes WHERE quarantined_reason <> ''")
    return int(found)


async def test_ongoing_episodes_are_quarantined_in_steps_before_a_days_calls_are_dropped(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.retaining.MOST_AT_ONCE", 2)
    calls = [call(f"long {n}", **made(day, 9 * day + n)) for n in range(5) for day in (3, 1)]
    await Ingester().store(engine, [*calls, call("new", **made(1, 0))])
    steps = []
    while (removed := await remove_some(engine, BEFORE)) is not None:
        steps.append((await aside(engine), removed.calls))
    # The day is noted, five are set aside, and the day is dropped.
    assert steps == [(0, 0), (2, 0), (4, 0), (5, 0), (5, 5)]
    assert await rows(engine, "SELECT sum(calls) FROM dropped_days") == [5]


async def test_call_of_a_day_that_is_being_removed_is_not_stored(
    engine: AsyncEngine,
) -> None:
    ingester = Ingester()
    await ingester.store(engine, thread("long", 3, 3))
    assert await remove_some(engine, BEFORE) is not None
    late = call("late", **made(3, 9))
    assert await ingester.store(engine, [late, call("late", **made(1, 9))]) == {late.id}
    await remove_outdated_records(engine, BEFORE)
    assert await aside(engine) == 2


async def test_records_are_stored_while_an_outdated_day_is_scanned(
    engine: AsyncEngine,
) -> None:
    ingester = Ingester()
    await ingester.store(engine, [*thread("long", 3, 3), call("new", **made(1, 1))])
    table = f"transitions_{NOON - timedelta(days=3):%Y%m%d}"
    waits = f"SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = '{table}'::regclass"
    # As long as this lock is held, nobody can read what calls the day has.
    async with engine.connect() as connection, asyncio.timeout(60):
        await connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        removing = asyncio.create_task(remove_outdated_records(engine, BEFORE))
        await awaited(lambda: rows(engine, waits), lambda found: found == [1])
        await ingester.store(engine, [call("new", **made(1, 2))])
        assert not removing.done()
    await removing
    assert await rows(engine, PARTITIONS) == [2]


async def test_removed_trained_episode_still_counts_as_trained(engine: AsyncEngine) -> None:
    await Ingester().store(
        engine,
        [
            call("spent", **made(5, 1)),
            call("unspent", **made(5, 2)),
            reward(1.0, episode="spent"),
        ],
    )
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    claim = await claimed(engine, RULE)
    assert claim is not None
    await consume_all(engine, claim, version=1)
    # The first step notes the day.
    assert await remove_some(engine, BEFORE) is not None
    removed = await remove_some(engine, BEFORE)
    assert removed is not None
    assert (removed.episodes, removed.unspent) == (2, 1)
    await remove_outdated_records(engine, BEFORE)
    assert await exported(engine) == {}
    async with engine.connect() as connection:
        counted = await totals(connection)
    assert (counted.episodes, counted.trained_episodes) == (0, 1)
    assert await rows(engine, "SELECT count(*) FROM episodes") == [1]
    # The name may be used again.
    await Ingester().store(engine, [call("spent", **made(1, 3))])
    assert list(await exported(engine)) == ["spent"]


async def test_episode_is_quarantined_if_its_late_call_is_too_old_to_be_stored(
    engine: AsyncEngine,
) -> None:
    ingester = Ingester()
    await ingester.store(engine, [call("old", **made(9, 1))])
    await remove_outdated_records(engine, BEFORE)
    # In either order, and where the late call is the first that comes.
    late = call("before", **made(9, 2)), call("after", **made(9, 3))
    await ingester.store(
        engine, [late[0], call("after", **made(1, 4)), call("whole", **made(1, 5))]
    )
    left_out = await ingester.store(engine, [call("before", **made(1, 6)), late[1]])
    assert left_out == {late[1].id}
    aside = "SELECT key FROM episodes WHERE quarantined_reason IS NOT NULL ORDER BY key"
    assert await rows(engine, aside) == ["after", "before"]


async def test_clock_that_is_ahead_causes_no_removal_of_new_episodes(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=1000)

    monkeypatch.setattr(outdated, "datetime", Ahead)
    await Ingester().store(engine, [call("old", **made(9, 1)), call("new")])
    await outdated.remove_outdated(tmp_path, 2, engine)
    assert list(await exported(engine)) == ["new"]


async def test_removal_of_outdated_episodes_does_nothing_while_another_removal_runs(
    engine: AsyncEngine,
) -> None:
    await Ingester().store(engine, [call("old", **made(9, 1))])
    async with engine.connect() as connection:
        await connection.execute(text(f"SELECT pg_advisory_lock({RETAIN_LOCK})"))
        assert await remove_some(engine, BEFORE) is None
        await connection.execute(text(f"SELECT pg_advisory_unlock({RETAIN_LOCK})"))
    assert await remove_some(engine, BEFORE) is not None


def letter(folder: Path, name: str, frame: Frame | bytes) -> None:
    payload = frame if isinstance(frame, bytes) else encode_payload(frame)
    write_dead_letters(folder, [DeadLetter(name, payload, "why")])


def letters_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "dead").iterdir())


def test_old_dead_letters_are_removed(tmp_path: Path) -> None:
    old = made(9, 1)["id"]
    letter(tmp_path, "old", captured(id=old.bytes))
    letter(tmp_path, "new", captured())
    letter(tmp_path, "said", reward(1.0, episode="e", at=-400 * 86_400))
    letter(tmp_path, "gap", GapRecord(id=old, episodes=("e", "f")))
    for name in ("torn", "old torn"):
        letter(tmp_path, name, b"torn")
    # When it was made, its file says.
    os.utime(tmp_path / "dead" / "old torn.letter", (0, time_of(old).timestamp()))
    assert remove_old_letters(tmp_path, BEFORE) == 4
    assert letters_in(tmp_path) == ["new.letter", "new.reason", "torn.letter", "torn.reason"]
    assert remove_old_letters(tmp_path, BEFORE) == 0


async def test_removal_of_outdated_episodes_is_retried_after_a_failure(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await Ingester().store(engine, [call("old", **made(9, 1)), call("new")])
    failures = iter([OSError("the disk fails")])

    def connect() -> AsyncEngine:
        for failure in failures:
            raise failure
        return engine

    work = partial(outdated.remove_outdated, tmp_path, 2)
    keeping = asyncio.create_task(repeat(work, connect, 0.01))
    try:
        await awaited(lambda: exported(engine), lambda found: "old" not in found)
        assert list(await exported(engine)) == ["new"]
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def test_pending_feedback_is_bounded_by_number_and_age(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.retaining.MOST_PENDING", 3)
    names = [f"{n}" for n in range(5)] + [scoped("acme", f"{n}") for n in range(4)]
    said = [reward(1.0, episode=name, key=name) for name in ("old", *names, "known")]
    await Ingester().store(engine, [call("known", **made(40, 1)), *said])
    async with engine.begin() as connection:
        age = "CASE WHEN target IN ('old', 'known') THEN interval '31 d' ELSE interval '29 d' END"
        await connection.execute(text(f"UPDATE feedback SET at = now() - {age}"))
    before = outdated.OUTDATED.labels("pending")._value.get()
    await outdated.remove_pending(30, engine)
    assert outdated.OUTDATED.labels("pending")._value.get() == before + 4
    kept = await rows(engine, "SELECT target FROM feedback ORDER BY id")
    assert kept == ["2", "3", "4", *names[-3:], "known"]
    left = await rows(engine, "SELECT idempotency_key FROM feedback_requests ORDER BY id")
    assert left == kept
