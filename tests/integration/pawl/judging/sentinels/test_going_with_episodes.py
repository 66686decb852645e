"""Sentinels go with their episodes: nothing of a deleted or outdated one lives on in them."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.sentinels.choosing import Choice, chosen
from store.deleting.choosing import named
from store.ids import lowest_id_at
from store.judge.judgements import Judgement, note
from store.judge.sentinels import Rescored, add_sentinels, note_score, sentinels_of
from store.retaining.outdated import remove_some
from store.retaining.periods import Cuts
from store.write.ingest import Ingester
from tests.support.ledger.deleting import deleted, places_with
from tests.support.ledger.sentinels import Mood, make_sentinels, names, newest, score
from tests.support.records import START, call
from tests.support.waiting import eventually

CANARY = "canary-5b1c-1"


async def test_a_deleted_episode_is_a_sentinel_no_more_and_that_is_shown(
    engine: AsyncEngine,
) -> None:
    await make_sentinels(engine, [*names(4), CANARY], draws=1)
    judge = Mood()
    judge.fails = {CANARY}
    await score(engine, judge, times=2)
    assert "sentinel_scores.reason" in await places_with(engine, CANARY)
    receipt = await deleted(engine, CANARY)
    assert receipt.removed["sentinels"] == 1
    assert await places_with(engine, CANARY) == []
    ended = await score(engine, judge)
    assert (ended.scored, ended.unscored, ended.gone) == (4, 0, 1)
    assert (await score(engine, judge)).gone == 0


async def test_what_is_said_of_one_that_is_deleted_meanwhile_is_not_written(
    engine: AsyncEngine,
) -> None:
    await make_sentinels(engine, [CANARY])
    async with engine.connect() as connection:
        [found] = await sentinels_of(connection, "mood")
        [whole] = (await named(connection, [CANARY])).wholes
    await deleted(engine, CANARY)
    async with engine.begin() as connection:
        failed = Rescored(outcome="failed", reason=CANARY)
        await note_score(connection, "mood", 1, whole, failed)
        # Nor does it become one again, by somebody who had looked before.
        assert await add_sentinels(connection, "mood", [found], 3) == 0
    assert await places_with(engine, CANARY) == []


@pytest.mark.parametrize("about", ["judgement", "sentinel"])
async def test_a_deletion_waits_for_who_writes_about_the_episode_and_finds_it(
    engine: AsyncEngine, about: str
) -> None:
    await Ingester().store(engine, [call(CANARY)])
    async with engine.connect() as connection:
        [found] = await chosen(connection, "j", Choice(names=(CANARY,)))
    async with engine.begin() as connection:
        if about == "sentinel":
            assert await add_sentinels(connection, "j", [found], 1) == 1
        else:
            failed = Judgement(
                episode_id=found.episode_id,
                judge="j",
                outcome="failed",
                attempts=1,
                last_call_at=START,
                reason=CANARY,
            )
            await note(connection, failed)
        deletion = asyncio.create_task(deleted(engine, CANARY))
        await eventually(lambda: _somebody_waits(engine))
    assert (await deletion).removed[f"{about}s"] == 1
    assert await places_with(engine, CANARY) == []


async def _somebody_waits(engine: AsyncEngine) -> bool:
    """Whether somebody waits for a lock that is no advisory one."""
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype <> 'advisory'"
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(query)))


async def test_an_outdated_episode_goes_with_its_scores(engine: AsyncEngine) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=9)
    old = call("e-1", id=UUID(int=lowest_id_at(long_ago).int + 1), started_at=long_ago)
    await Ingester().store(engine, [old, call("e-2")])
    async with engine.begin() as connection:
        found = await chosen(connection, "mood", Choice(names=("e-1", "e-2")))
        await add_sentinels(connection, "mood", found, 1)
    judge = Mood()
    await score(engine, judge)
    cuts = Cuts(others=datetime.now(UTC).date() - timedelta(days=2))
    while await remove_some(engine, cuts) is not None:
        pass
    ended = await score(engine, judge)
    assert (ended.scored, ended.gone) == (1, 1)
    assert [one.scored for one in await newest(engine)] == [1, 2]
