"""The ledger: any order, repetition or lateness of records ends in the same rows."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import driver_of
from store.errors import RecordRefused
from store.ids import lowest_id_at, new_id, time_of
from store.questions import known_targets
from store.read.episodes import read_episodes
from store.records import SpoolRecord, ToolCall
from store.schema.partitions import partition_name
from store.selecting import select_episodes
from store.write.ingest import Ingester
from tests.support.ledger.episodes import episodes, store
from tests.support.records import call, reward, tokens, tool_event


async def test_stored_call_is_read_back_unchanged(engine: AsyncEngine) -> None:
    body = b'{"model":"m", "big":12345678901234567890, "nul":"\\u0000", "z":1, "a":2}'
    await store(engine, call(request=body, tokens=tokens([7, 8], [9], -0.25)))
    [episode] = await episodes(engine)
    [stored] = episode.calls
    assert stored.request == body
    assert stored.tokens == tokens([7, 8], [9], -0.25)


async def test_record_stored_twice_is_stored_once(engine: AsyncEngine) -> None:
    records: list[SpoolRecord] = [
        call(tool_events=(tool_event("ok", "t"),)),
        reward(1.0, episode="e1"),
    ]
    await store(engine, *records)
    await store(engine, *records)
    [episode] = await episodes(engine)
    assert len(episode.calls) == 1
    assert len(episode.feedback) == 1
    assert len(episode.stray_tool_events) == 1


async def test_a_reward_that_comes_before_its_call_is_matched(engine: AsyncEngine) -> None:
    record = call(method="own", response_id="chatcmpl-1")
    await store(engine, reward(0.5, response="chatcmpl-1"))
    await store(engine, record)
    [episode] = await episodes(engine)
    # The only call of an episode of its own: the episode is scored.
    assert [f.value for f in episode.feedback] == [0.5]


async def test_reward_for_a_call_among_several_of_an_episode_stays_with_that_call(
    engine: AsyncEngine,
) -> None:
    first, second = call(), call()
    await store(engine, first, second, reward(0.5, call=str(second.id)))
    [episode] = await episodes(engine)
    assert episode.feedback == ()
    assert [len(c.feedback) for c in episode.calls] == [0, 1]


async def test_tool_events_are_matched_to_the_call_that_asked_for_the_tool(
    engine: AsyncEngine,
) -> None:
    asking = call(tool_calls=(ToolCall(id="t1", name="calc", arguments="{}"),))
    telling = call(tool_events=(tool_event("error", "t1"), tool_event("ok", "unasked")))
    await store(engine, telling, asking)
    [episode] = await episodes(engine)
    by_id = {c.id: c for c in episode.calls}
    assert [e.status for e in by_id[asking.id].tool_events] == ["error"]
    assert by_id[telling.id].tool_events == ()
    assert [e.tool_id for e in episode.stray_tool_events] == ["unasked"]


async def test_feedback_repeated_under_its_idempotency_key_is_stored_once(
    engine: AsyncEngine,
) -> None:
    await store(engine, call(), reward(1.0, episode="e1", key="k"))
    await store(engine, reward(1.0, episode="e1", key="k"))
    [episode] = await episodes(engine)
    assert len(episode.feedback) == 1


async def test_named_task_overrides_a_derived_task(engine: AsyncEngine) -> None:
    early, late = call(task=None), call(task="named")
    await store(engine, late)
    await store(engine, early)
    [episode] = await episodes(engine)
    assert episode.task == "named"


async def test_episodes_with_equal_first_prompts_share_a_task(engine: AsyncEngine) -> None:
    await store(engine, call("a"), call("b"), call("c", tokens=tokens([9], [1])))
    tasks = [e.task for e in await episodes(engine)]
    assert tasks[0] == tasks[1] != tasks[2]


async def test_calls_of_several_days_find_their_partitions(engine: AsyncEngine) -> None:
    moment = datetime(2026, 3, 1, 0, 0, tzinfo=UTC)
    old = [lowest_id_at(moment + timedelta(milliseconds=ms)) for ms in (-1, 0)]
    await store(engine, *[call(id=identifier) for identifier in old], call())
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT tableoid::regclass::text FROM transitions ORDER BY id")
        )
        assert list(rows.scalars())[:2] == ["transitions_20260228", "transitions_20260301"]


async def test_partition_of_a_new_day_is_made_without_waiting_for_readers(
    engine: AsyncEngine,
) -> None:
    await store(engine, call())
    yesterday = lowest_id_at(datetime.now(UTC) - timedelta(days=1))
    async with engine.connect() as reader:
        await read_episodes(reader, await select_episodes(reader))
        await asyncio.wait_for(store(engine, call("e2", id=yesterday)), timeout=30)
    assert len(await episodes(engine)) == 2


async def test_a_partition_that_was_dropped_is_made_again(engine: AsyncEngine) -> None:
    ingester = Ingester()
    request = b"the same" * 40
    stored = call("a", request=request)
    await ingester.store(engine, [stored])
    async with engine.begin() as connection:
        day = partition_name(time_of(stored.id).date())
        await connection.execute(text(f"DROP TABLE {day}"))
    await ingester.store(engine, [call("a", request=request)])
    [episode] = await episodes(engine)
    assert [c.request for c in episode.calls] == [request]


async def test_later_call_is_not_stored_as_an_addition_to_a_call_of_a_refused_batch(
    engine: AsyncEngine,
) -> None:
    ingester, request = Ingester(), b"x" * 300
    with pytest.raises(RecordRefused):
        await ingester.store(engine, [call("a", request=request), call("b", status="lost")])
    await ingester.store(engine, [call("a", request=request)])
    [episode] = await episodes(engine)
    assert [c.request for c in episode.calls] == [request]


async def test_recorded_episodes_responses_and_calls_are_known_targets_of_feedback(
    engine: AsyncEngine,
) -> None:
    record = call(response_id="r1")
    await store(engine, record)
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        asked = [("episode", "e1"), ("response", "r1"), ("call", str(record.id)), ("episode", "x")]
        assert await known_targets(driver, asked) == set(asked[:3])


@pytest.mark.parametrize("changes", [{"status": "lost"}, {"trainable": False, "reason": None}])
async def test_database_refuses_inconsistent_calls(
    engine: AsyncEngine, changes: dict[str, Any]
) -> None:
    with pytest.raises(RecordRefused):
        await store(engine, call(**changes))


async def test_concurrent_batches_of_the_same_episodes_do_not_deadlock(engine: AsyncEngine) -> None:
    batches = [[call(f"e{random.randrange(8)}") for _ in range(40)] for _ in range(6)]
    await asyncio.gather(*[store(engine, *batch) for batch in batches])
    assert sum(len(e.calls) for e in await episodes(engine)) == 240


def test_record_ids_carry_the_time_of_their_making() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    assert before <= time_of(new_id()) <= datetime.now(UTC)
