"""How tools ended, as the ledger knows it: from results, and whoever states it more surely."""

from collections.abc import AsyncIterator
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.tool_events import parse_readers
from store.ids import new_id
from store.read.episodes import episode_ids, read_episodes
from store.records import FeedbackItem, FeedbackRecord, SpoolRecord, ToolCall, ToolEvent
from store.version_states import ensure_base
from store.write.ingest import ingest
from tests.integration.conftest import Proxy, proxy_with, settings_for
from tests.support.records import START, call, tool_event
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
ANTHROPIC_TOOLS = [{"name": "calc", "input_schema": {"type": "object"}}]


@pytest.fixture
async def reading(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy that reads the results of `calc`."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    settings = settings_for(database_url, upstream.url, tmp_path).model_copy(
        update={"tool_results": parse_readers("calc=json_error")}
    )
    async with proxy_with(settings, engine) as found:
        yield found


async def stored_events(engine: AsyncEngine) -> list[tuple[str, str, str]]:
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT tool_id, status, source FROM tool_events ORDER BY at, source")
        )
        return [(row.tool_id, row.status, row.source) for row in rows]


async def standing(proxy: Proxy, calls: int) -> list[list[tuple[str, str | None]]]:
    [episode] = await proxy.episodes(calls)
    return [[(e.status, e.name) for e in call.tool_events] for call in episode.calls]


async def counted_errors(proxy: Proxy) -> float:
    """What `/metrics` says so far; other tests of this process count there as well."""
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    name = 'pawl_tool_events_total{status="error"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def test_a_chats_result_is_an_event_of_the_call_that_asked(reading: Proxy) -> None:
    counted = await counted_errors(reading)
    messages: list[Any] = [{"role": "user", "content": "2+2"}]
    asked = (await reading.chat(messages=messages, tools=TOOLS)).json["choices"][0]["message"]
    tool_id = asked["tool_calls"][0]["id"]
    messages += [asked, {"role": "tool", "tool_call_id": tool_id, "content": '{"error": "no"}'}]
    done = (await reading.chat(messages=messages, tools=TOOLS)).json["choices"][0]["message"]
    # Later requests of the thread repeat the result; it is stored once.
    messages += [done, {"role": "user", "content": "and now?"}]
    await reading.chat(messages=messages)
    assert await standing(reading, 3) == [[("error", "calc")], [], []]
    assert await stored_events(reading.engine) == [(tool_id, "error", "reader")]

    async def is_counted() -> bool:
        # It is counted after its batch is stored.
        return await counted_errors(reading) == counted + 1

    await eventually(is_counted)


async def test_the_header_beats_what_a_result_says(reading: Proxy) -> None:
    messages: list[Any] = [{"role": "user", "content": "2+2"}]
    asked = (await reading.chat(messages=messages, tools=TOOLS)).json["choices"][0]["message"]
    tool_id = asked["tool_calls"][0]["id"]
    messages += [asked, {"role": "tool", "tool_call_id": tool_id, "content": '{"error": "no"}'}]
    header = {"x-pawl-tool-status": f'denied;id="{tool_id}"'}
    await reading.chat(messages=messages, headers=header)
    assert await standing(reading, 2) == [[("denied", None)], []]


@pytest.mark.parametrize(
    ("stated", "status", "source"),
    [
        ({"is_error": True}, "error", "is_error"),
        ({"is_error": False}, "ok", "is_error"),
        ({}, "ok", "assumed"),
    ],
)
async def test_anthropics_results_need_no_setting(
    proxy: Proxy, stated: Any, status: str, source: str
) -> None:
    async def say(messages: list[Any]) -> Any:
        body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": ANTHROPIC_TOOLS}
        async with proxy.session.post(f"{proxy.url}/v1/messages", json=body) as reply:
            assert reply.status == 200
            return await reply.json()

    messages: list[Any] = [{"role": "user", "content": "2+2"}]
    asked = await say(messages)
    [block] = [block for block in asked["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "4"} | stated
    messages.append({"role": "assistant", "content": asked["content"]})
    messages.append({"role": "user", "content": [result]})
    await say(messages)
    assert await standing(proxy, 2) == [[(status, "calc")], []]
    assert await stored_events(proxy.engine) == [(block["id"], status, source)]


# What stands, in any order of arrival


def event(status: str, source: str) -> ToolEvent:
    return msgspec.structs.replace(tool_event(status, "t1"), source=source)


def feedback_event(status: str, at: int) -> FeedbackRecord:
    event_id = new_id()
    item = FeedbackItem(
        id=event_id,
        metric="tool_status",
        value=None,
        target_kind="episode",
        target="e1",
        tool=msgspec.structs.replace(tool_event(status, "t1", event_id), source="feedback"),
    )
    return FeedbackRecord(id=new_id(), at=START.replace(year=START.year + at), items=(item,))


@pytest.mark.parametrize("order", list(permutations(range(4))))
async def test_the_surest_source_stands_in_any_order(
    engine: AsyncEngine, order: tuple[int, ...]
) -> None:
    asked = (ToolCall(id="t1", name="calc", arguments="{}"),)
    # The oldest statement is the surest.
    records: list[SpoolRecord] = [
        call("e1", tool_calls=asked),
        feedback_event("denied", at=-1),
        call("e1", tool_events=(event("timeout", "reader"), event("error", "is_error"))),
        call("e1", tool_events=(event("ok", "assumed"), event("ok", "reader"))),
    ]
    for index in order:
        async with engine.begin() as connection:
            await ingest(connection, [records[index]])
    async with engine.connect() as connection:
        [episode] = await read_episodes(connection, await episode_ids(connection))
    assert [(e.status, e.source) for c in episode.calls for e in c.tool_events] == [
        ("denied", "feedback")
    ]


async def test_is_error_beats_the_reader_and_the_reader_the_default(engine: AsyncEngine) -> None:
    asked = (ToolCall(id="t1", name="calc", arguments="{}"),)
    told = [
        call("e1", tool_calls=asked, tool_events=(event("error", "is_error"),)),
        call("e1", tool_events=(event("timeout", "reader"),)),
        call("e1", tool_events=(event("ok", "assumed"),)),
    ]
    async with engine.begin() as connection:
        await ingest(connection, told)
    async with engine.connect() as connection:
        [episode] = await read_episodes(connection, await episode_ids(connection))
    assert [e.status for e in episode.calls[0].tool_events] == ["error"]
