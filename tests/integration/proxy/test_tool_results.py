"""How tools ended, as the ledger knows it: from results, and whoever states it more surely."""

from collections.abc import AsyncIterator
from itertools import permutations
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.tool_events import parse_readers
from store.ids import new_id
from store.read.episodes import read_episodes
from store.records import CallRecord, FeedbackItem, FeedbackRecord, SpoolRecord, ToolCall
from store.selecting import select_episodes
from tests.integration.conftest import Proxy, StartProxy
from tests.support.ledger.episodes import ingest
from tests.support.records import START, call, tool_event
from tests.support.waiting import eventually

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
ANTHROPIC_TOOLS = [{"name": "calc", "input_schema": {"type": "object"}}]


@pytest.fixture
async def reading(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    """A proxy that reads the results of `calc`."""
    async with start_proxy(tool_results=parse_readers("calc=json_error")) as proxy:
        yield proxy


async def stored_events(engine: AsyncEngine) -> list[tuple[str, str, str]]:
    query = "SELECT tool_id, status, source FROM tool_events ORDER BY at, source"
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(text(query))]


async def standing(proxy: Proxy, calls: int) -> list[list[tuple[str, str | None]]]:
    [episode] = await proxy.episodes(calls)
    return [[(e.status, e.name) for e in call.tool_events] for call in episode.calls]


async def failed(proxy: Proxy) -> tuple[str, list[Any]]:
    """Ask for a tool; return the call's id, and a conversation in which it failed."""
    messages: list[Any] = [{"role": "user", "content": "2+2"}]
    asked = (await proxy.chat(messages=messages, tools=TOOLS)).json["choices"][0]["message"]
    tool_id = asked["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": tool_id, "content": '{"error": "no"}'}
    return tool_id, [*messages, asked, result]


async def test_tool_result_in_a_chat_becomes_an_event_of_the_call_that_asked_for_the_tool(
    reading: Proxy,
) -> None:
    sample = 'pawl_tool_events_total{status="error"}'
    counted = (await reading.counters()).get(sample, 0)
    tool_id, messages = await failed(reading)
    done = (await reading.chat(messages=messages, tools=TOOLS)).json["choices"][0]["message"]
    # Later requests of the thread repeat the result; it is stored once.
    messages += [done, {"role": "user", "content": "and now?"}]
    await reading.chat(messages=messages)
    assert await standing(reading, 3) == [[("error", "calc")], [], []]
    assert await stored_events(reading.engine) == [(tool_id, "error", "reader")]

    async def is_counted() -> bool:
        # It is counted after its batch is stored.
        return (await reading.counters()).get(sample) == counted + 1

    await eventually(is_counted)


async def test_tool_status_header_overrides_the_tool_result(reading: Proxy) -> None:
    tool_id, messages = await failed(reading)
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
async def test_tool_results_in_anthropics_api_are_read_without_a_setting(
    proxy: Proxy, stated: Any, status: str, source: str
) -> None:
    async def say(messages: list[Any]) -> Any:
        body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": ANTHROPIC_TOOLS}
        reply = await proxy.ask("POST", "/v1/messages", **body)
        assert reply.status == 200
        return reply.json

    messages: list[Any] = [{"role": "user", "content": "2+2"}]
    asked = await say(messages)
    [block] = [block for block in asked["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "4"} | stated
    messages.append({"role": "assistant", "content": asked["content"]})
    messages.append({"role": "user", "content": [result]})
    await say(messages)
    assert await standing(proxy, 2) == [[(status, "calc")], []]
    assert await stored_events(proxy.engine) == [(block["id"], status, source)]


ASKED = call("e1", tool_calls=(ToolCall(id="t1", name="calc", arguments="{}"),))


def read(*statements: tuple[str, str]) -> CallRecord:
    """A call that brought these statuses from these sources."""
    events = (
        msgspec.structs.replace(tool_event(status, "t1"), source=source)
        for status, source in statements
    )
    return call("e1", tool_events=tuple(events))


def feedback_event(status: str, at: int) -> FeedbackRecord:
    event_id = new_id()
    tool = msgspec.structs.replace(tool_event(status, "t1", event_id), source="feedback")
    said: Any = {"metric": "tool_status", "value": None, "target_kind": "episode", "target": "e1"}
    item = FeedbackItem(id=event_id, tool=tool, **said)
    return FeedbackRecord(id=new_id(), at=START.replace(year=START.year + at), items=(item,))


async def standing_in(engine: AsyncEngine, *batches: list[SpoolRecord]) -> list[tuple[str, str]]:
    """Return the statuses that stand, and their sources, once these are stored."""
    for batch in batches:
        async with engine.begin() as connection:
            await ingest(connection, batch)
    async with engine.connect() as connection:
        [episode] = await read_episodes(connection, await select_episodes(connection))
    return [(e.status, e.source) for c in episode.calls for e in c.tool_events]


@pytest.mark.parametrize("order", list(permutations(range(4))))
async def test_surest_source_of_a_tools_status_counts_in_any_order_of_arrival(
    engine: AsyncEngine, order: tuple[int, ...]
) -> None:
    # The oldest statement is the surest.
    records: list[SpoolRecord] = [
        ASKED,
        feedback_event("denied", at=-1),
        read(("timeout", "reader"), ("error", "is_error")),
        read(("ok", "assumed"), ("ok", "reader")),
    ]
    found = await standing_in(engine, *([records[index]] for index in order))
    assert found == [("denied", "feedback")]


async def test_tool_status_of_is_error_overrides_the_result_reader_and_the_default(
    engine: AsyncEngine,
) -> None:
    statements = (("error", "is_error"), ("timeout", "reader"), ("ok", "assumed"))
    found = await standing_in(engine, [ASKED, *map(read, statements)])
    assert found == [("error", "is_error")]


async def test_call_of_an_unoffered_tool_is_malformed_despite_an_ok_result(
    engine: AsyncEngine,
) -> None:
    statements = (("malformed", "not_offered"), ("ok", "is_error"), ("ok", "assumed"))
    found = await standing_in(engine, [ASKED, *map(read, statements)])
    assert found == [("malformed", "not_offered")]
