"""Episodes become sentinels a few at a time, locked in the order in which all lock them."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.sentinels import choosing
from pawl.judging.sentinels.choosing import Choice, add, chosen
from store.judge.judgements import hold_episodes
from store.judge.sentinels import sentinels_of
from store.write.ingest import Ingester
from tests.support.ledger.sentinels import names
from tests.support.records import call
from tests.support.waiting import eventually

FREE = "SELECT key FROM episodes ORDER BY key FOR UPDATE SKIP LOCKED"


async def test_many_become_sentinels_in_transactions_of_a_few(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "AT_ONCE", 3)
    await Ingester().store(engine, [call(key) for key in names(8)])
    assert await add(engine, "mood", Choice(names=tuple(names(5))), 3) == 5
    # Those that are ones already count no more: what was broken off is repeated.
    assert await add(engine, "mood", Choice(names=tuple(names(8))), 3) == 3
    async with engine.connect() as connection:
        assert len(await sentinels_of(connection, "mood")) == 8
        query = "SELECT count(DISTINCT xmin::text) FROM sentinels"
        assert await connection.scalar(text(query)) >= 3


async def test_episodes_are_locked_in_the_order_of_their_keys(engine: AsyncEngine) -> None:
    # Their ids, by which a row is found, are in another order.
    await Ingester().store(engine, [call(key) for key in ("c", "a", "d", "b")])
    async with engine.connect() as connection:
        found = await chosen(connection, "mood", Choice(names=("d", "c", "b", "a")))
    ids = [one.episode_id for one in found]

    async def held() -> Any:
        async with engine.begin() as connection:
            return await hold_episodes(connection, ids)

    async with engine.begin() as connection:
        await connection.execute(text("SELECT FROM episodes WHERE key = 'b' FOR UPDATE"))
        task = asyncio.create_task(held())

        async def waits() -> bool:
            async with engine.begin() as other:
                free = list((await other.execute(text(FREE))).scalars())
            return free == ["c", "d"]

        await eventually(waits)
    assert await task == set(ids)
