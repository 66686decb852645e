"""Revision 0015: digests of executed texts, on calls and events that there were before."""

from uuid import UUID

import msgspec
from sqlalchemy import text

from store.connection.engine import make_engine
from store.ids import new_id, time_of
from store.read.episodes import episode_ids, read_episodes
from store.schema.migrate import check, downgrade, upgrade
from store.schema.partitions import ensure_partition
from store.values.tokens import pack_logprobs
from store.write.ingest import Ingester
from tests.integration.store.migrations.test_stored_before import OLD_EPISODE
from tests.support.records import call, tool_event

TEXT = UUID(int=7)
OLD_CALL = """
    INSERT INTO transitions (id, episode_id, method, confidence, agent, dialect, policy,
        policy_version, status, stream, request, reply, prompt_ids, sampled_ids, sampled_logprobs,
        sampling, trainable, tool_calls, started_at, total_ms, retry)
    VALUES (:id, :id, 'own', 'certain', 'default', 'chat', 'm', 0, 'complete', false, :request,
        :reply, :ids, :ids, :logprobs, '{"temperature": 1.0}', true, '[]', now(), 1, 0)
"""
OLD_EVENT = """
    INSERT INTO tool_events (id, episode_id, tool_id, name, status, source, at)
    VALUES (:id, :id, 'made_up', 'sql', 'ok', 'reader', now())
"""


async def test_events_from_before_are_nobodys_and_stay(empty_database_url: str) -> None:
    url = empty_database_url
    await upgrade(url, "0014")
    engine = make_engine(url)
    old = new_id()
    values = {"id": old, "request": b"{}", "reply": b'{"id": "r"}', "ids": b"\x01\x00\x00\x00"}
    async with engine.begin() as connection:
        await ensure_partition(connection, time_of(old).date())
        await connection.execute(text(OLD_EPISODE), {"id": old})
        await connection.execute(text(OLD_CALL), values | {"logprobs": pack_logprobs([-0.5])})
        await connection.execute(text(OLD_EVENT), {"id": old})
    await engine.dispose()

    await upgrade(url)
    await check(url)
    said = msgspec.structs.replace(call("new"), id=UUID(int=time_ago(old)), text_digest=TEXT)
    told = msgspec.structs.replace(tool_event("ok", "made_up"), quotes=(TEXT,))
    await Ingester().store(engine, [said, call("new", tool_events=(told,))])
    async with engine.connect() as connection:
        episodes = await read_episodes(connection, await episode_ids(connection))
    events = {one.key: [event.tool_id for event in one.calls[0].tool_events] for one in episodes}
    assert events == {"old": [], "new": ["made_up"]}
    [before] = [one for one in episodes if one.key == "old"]
    assert [event.tool_id for event in before.stray_tool_events] == ["made_up"]
    await engine.dispose()

    await downgrade(url, "0014")
    async with engine.connect() as connection:
        kept = await connection.execute(text("SELECT count(*) FROM tool_events"))
        assert kept.scalar() == 2
    await engine.dispose()
    await upgrade(url)
    await check(url)


def time_ago(call_id: UUID) -> int:
    """A call's id as it would have been a second before."""
    return call_id.int - (1000 << 80)
