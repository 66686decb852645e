"""Revision 0017: digests of executed texts, on calls and events that there were before."""

from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.connection.engine import make_engine
from store.read.episodes import episode_ids, read_episodes
from store.records import CallRecord
from store.schema.migrate import check, downgrade, upgrade
from store.write.ingest import Ingester
from tests.support.records import call, tool_event

TEXT = UUID(int=7)
SECOND = 1000 << 80


def executed(episode: str) -> list[CallRecord]:
    """A reply, and a second later a call that has the outcome of what it said."""
    after = call(episode, tool_events=(tool_event("ok", "made_up"),))
    quoting = tuple(msgspec.structs.replace(one, quotes=(TEXT,)) for one in after.tool_events)
    before = msgspec.structs.replace(
        call(episode), id=UUID(int=after.id.int - SECOND), text_digest=TEXT
    )
    return [before, msgspec.structs.replace(after, tool_events=quoting)]


async def owned(engine: AsyncEngine) -> dict[str, tuple[list[str], list[str]]]:
    """The tools of each episode's first call, and those that are nobody's."""
    async with engine.connect() as connection:
        episodes = await read_episodes(connection, await episode_ids(connection))
    return {
        one.key: (
            [event.tool_id for event in one.calls[0].tool_events],
            [event.tool_id for event in one.stray_tool_events],
        )
        for one in episodes
    }


async def test_events_from_before_are_nobodys_and_stay(database_url: str) -> None:
    url = database_url
    engine = make_engine(url)
    await Ingester().store(engine, executed("old"))
    assert await owned(engine) == {"old": (["made_up"], [])}
    await engine.dispose()

    await downgrade(url, "0016")
    async with engine.connect() as connection:
        kept = await connection.execute(text("SELECT count(*) FROM tool_events"))
        assert kept.scalar() == 1
    await engine.dispose()
    await upgrade(url)
    await check(url)

    await Ingester().store(engine, executed("new"))
    assert await owned(engine) == {"old": ([], ["made_up"]), "new": (["made_up"], [])}
    await engine.dispose()
