"""Replies that are too long to be held or stored: clients get them whole, and memory is bounded."""

import asyncio
import gc
import gzip
import json
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.calls import answer, recording
from proxy.ingester import batch_writer, drain, transcribe
from proxy.ingester.drain import Drainer
from proxy.intake import Budget, BudgetShare
from proxy.spool.segments import CapturedCall
from tests.integration.conftest import Proxy, StartProxy
from tests.integration.faults.conftest import Spooled
from tests.support.faults.counters import assert_adds_up
from tests.support.records import captured
from tests.support.servers.raw_upstream import (
    CHAT,
    JSON,
    LAST,
    RawUpstream,
    chunked,
    post,
    raw_ask,
    raw_upstream,
    says,
    sized,
)
from tests.support.waiting import until

MB = 2**20
IN_FLIGHT_MB = 24
MOST = IN_FLIGHT_MB * MB // answer.REPLY_COPIES
CHUNKED = b"HTTP/1.1 200 OK\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = b"Content-Type: text/event-stream"
IDS = {"token_ids": [7, 8], "prompt_token_ids": [1]}


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    """It is vLLM: ids are asked of it."""
    async with raw_upstream("vllm") as server:
        yield server


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    async with start_proxy(in_flight_mb=IN_FLIGHT_MB, max_reply_mb=12) as found:
        yield found


@pytest.fixture
def most_used(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The most of the budget that was used at once, in bytes."""
    seen, move = [0], Budget._resize_claim

    def noted(self: Budget, held: int, now: int) -> None:
        move(self, held, now)
        seen[0] = max(seen[0], self.used)

    monkeypatch.setattr(Budget, "_resize_claim", noted)
    return lambda: seen[0]


def event(content: str, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None} | more
    return b"data: " + json.dumps({"id": "r1", "choices": [choice]}).encode() + b"\n\n"


def whole(words: int) -> bytes:
    choice = {"index": 0, "message": {"content": "x" * words}, "finish_reason": "stop"} | IDS
    return json.dumps({"id": "r1", "choices": [choice]}).encode()


async def stored(proxy: Proxy) -> Any:
    call = await proxy.only_call()
    return call.status, call.reason


@pytest.mark.parametrize("framing", ["sized", "chunked", "gzip"])
async def test_overlong_whole_reply_is_passed_on_unchanged(
    proxy: Proxy, upstream: RawUpstream, most_used: Callable[[], int], framing: str
) -> None:
    body = whole(MOST + 1)
    if framing == "sized":
        upstream.script = says(sized(b"200 OK", body, JSON))
    elif framing == "gzip":
        packed = gzip.compress(body)
        upstream.script = says(sized(b"200 OK", packed, JSON, b"Content-Encoding: gzip"))
    else:
        pieces = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
        upstream.script = says(CHUNKED % JSON, *(chunked(piece) for piece in pieces), LAST)
    response = await proxy.chat()
    assert (response.status, response.json) == (200, json.loads(body))
    assert await stored(proxy) == ("complete", "reply_too_long")
    assert most_used() <= IN_FLIGHT_MB * MB


async def test_overlong_stream_line_is_passed_on_unchanged_and_other_lines_without_token_ids(
    proxy: Proxy, upstream: RawUpstream, most_used: Callable[[], int]
) -> None:
    lines = event("a", **IDS), event("x" * (MOST + MB), **IDS), event("b", **IDS)
    stream = b"".join(lines) + event("", finish_reason="stop") + b"data: [DONE]\n\n"
    pieces = [stream[at : at + 100_000] for at in range(0, len(stream), 100_000)]
    upstream.script = says(CHUNKED % EVENTS, *(chunked(piece) for piece in pieces), LAST)
    response = await proxy.chat(stream=True)
    first, second, third, *_ = response.body.split(b"\n\n")
    assert second == lines[1].strip()
    assert [b"7" in line for line in (first, third)] == [False, False]
    assert await stored(proxy) == ("complete", "reply_too_long")
    assert most_used() <= IN_FLIGHT_MB * MB


async def test_overlong_stream_loses_its_token_ids_and_keeps_its_response_id(
    proxy: Proxy, upstream: RawUpstream, most_used: Callable[[], int]
) -> None:
    block = event("x" * 1000, **IDS) * 100
    ending = event("", finish_reason="stop") + b"data: [DONE]\n\n"
    blocks = [chunked(block)] * (16 * MB // len(block))
    upstream.script = says(CHUNKED % EVENTS, *blocks, chunked(ending), LAST)
    response = await proxy.chat(stream=True)
    assert response.body.count(b"x" * 1000) == 100 * len(blocks)
    assert b"7" not in response.body
    assert await stored(proxy) == ("complete", "reply_too_long")
    async with proxy.engine.connect() as connection:
        assert await connection.scalar(text("SELECT response_id FROM transitions")) == "r1"
    assert most_used() <= IN_FLIGHT_MB * MB


async def test_upstream_is_not_read_further_while_the_memory_budget_is_full(
    proxy: Proxy, upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "REPLY_COPIES", 1)
    # On a slow machine too, the wait for memory outlasts the look at the upstream.
    monkeypatch.setattr(answer, "ROOM_WAIT_S", 300.0)
    body, asked = whole(11 * MB), asyncio.Event()
    room = threading.Event()
    ask = BudgetShare.claim_at_least

    def refused(self: BudgetShare, size: int) -> None:
        if size > 2 * MB and not room.is_set():
            asked.set()
            raise answer.Overloaded("full")
        ask(self, size)

    monkeypatch.setattr(BudgetShare, "claim_at_least", refused)
    pieces = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
    upstream.script = says(CHUNKED % JSON, *(chunked(piece) for piece in pieces), LAST)
    calling = asyncio.create_task(proxy.chat())
    await asked.wait()
    held = -1
    while held != upstream.said:
        held = upstream.said
        await asyncio.sleep(0.2)
    assert held < len(body)
    room.set()
    response = await calling
    assert len(response.json["choices"][0]["message"]["content"]) == 11 * MB
    assert (await stored(proxy))[0] == "complete"


async def test_reply_that_gets_no_memory_in_time_is_passed_on_unchanged(
    proxy: Proxy, upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "ROOM_WAIT_S", 0.1)
    ask = BudgetShare.claim_at_least

    def refused(self: BudgetShare, size: int) -> None:
        if size > MB:
            raise answer.Overloaded("full")
        ask(self, size)

    monkeypatch.setattr(BudgetShare, "claim_at_least", refused)
    body = whole(MB)
    pieces = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
    upstream.script = says(
        CHUNKED % JSON, *(chunked(piece) for piece in pieces), LAST, pause_s=0.002
    )
    assert (await proxy.chat()).json == json.loads(body)
    assert await stored(proxy) == ("complete", "reply_too_long")


async def test_bytes_after_a_streams_end_reach_the_client(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    stream = event("hello") + b"data: [DONE]\n\n" + b": more\n" * 20_000
    upstream.script = says(CHUNKED % EVENTS + chunked(stream), LAST)
    assert (await proxy.chat(stream=True)).body == stream
    assert await stored(proxy) == ("complete", "no_token_ids")


@pytest.mark.parametrize("kind", [JSON, EVENTS], ids=["whole", "stream"])
@pytest.mark.parametrize("end", ["client gone", "client gone in the middle", "torn", "not HTTP"])
async def test_reply_that_breaks_off_is_freed_from_memory_at_once(
    proxy: Proxy, upstream: RawUpstream, kind: bytes, end: str
) -> None:
    """With reference cycles it would stay until garbage is collected, which is seldom."""
    pieces = [chunked(b": ping\n" * 20_000)] * (200 if end == "client gone in the middle" else 4)
    upstream.script = says(CHUNKED % kind, *pieces, then="reset" if end == "torn" else "hang")
    if end == "not HTTP":
        upstream.script = says(b"not HTTP\r\n\r\n")
    request = {"model": "m", "messages": [], "stream": kind == EVENTS}

    async def broken_off() -> None:
        if end.startswith("client"):
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(post(CHAT, json.dumps(request).encode()))
            await until(lambda: upstream.said >= 4 * len(pieces[0]), within_s=10)
            writer.transport.abort()
            await upstream.left.wait()
        else:
            await raw_ask(proxy.port, post(CHAT, json.dumps(request).encode()))
        upstream.said = 0
        upstream.left.clear()

    await broken_off()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await broken_off()
        # Nothing tells when a handler's frame has gone; what is left of it is no garbage before.
        await asyncio.sleep(0.1)
        gc.collect()
        kinds = {type(each) for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    names = {kind.__name__ for kind in kinds}
    assert not names & {"Call", "ReplyBuffer", "bytearray", "frame"}


async def test_long_reply_is_parsed_off_the_event_loop_and_the_next_call_joins_its_episode(
    proxy: Proxy, upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    provided = recording.provided_fingerprints

    def noted(*arguments: Any) -> tuple[bytes, ...]:
        threads.append(threading.current_thread())
        return provided(*arguments)

    monkeypatch.setattr(recording, "provided_fingerprints", noted)
    long = "a few words of text " * 12_000
    question: Any = {"role": "user", "content": "Say much."}
    for reply in (long, "ok"):
        ending = event("", finish_reason="stop") + b"data: [DONE]\n\n"
        parts = [event(reply[at : at + 20]) for at in range(0, len(reply), 20)]
        upstream.script = says(CHUNKED % EVENTS, chunked(b"".join(parts) + ending), LAST)
        repeated = [{"role": "assistant", "content": long}, question] if reply == "ok" else []
        assert (await proxy.chat(stream=True, messages=[question, *repeated])).status == 200
    is_loops = [thread is threading.main_thread() for thread in threads]
    assert is_loops == [False, True]
    # The second is stored first, as the long one is read apart, and joined by it.
    [episode] = await proxy.episodes(2, lambda found: len(found) == 1)
    assert len(episode.calls) == 2


async def test_other_calls_are_stored_while_a_long_reply_is_parsed(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, read = threading.Event(), transcribe.transcribe

    def slow(call: Any, *more: Any) -> Any:
        if call.episode == "long":
            assert go_on.wait(20)
        return read(call, *more)

    monkeypatch.setattr(transcribe, "transcribe", slow)
    spooled = Spooled(tmp_path, engine, Drainer(tmp_path, lambda: engine, batch=10))
    spooled.write(
        captured("long", reply_bytes=batch_writer.LONG_BYTES + 1, deflated=True),
        captured("a"),
    )
    draining = asyncio.create_task(spooled.drainer.run())
    await until(lambda: spooled.drainer.waiting_records == 1, within_s=10)
    assert await spooled.names() == {"a"}
    assert spooled.drainer.progress.state == "moving"
    go_on.set()
    # It cannot be inflated: a dead letter.
    await until(lambda: len(spooled.letters()) == 1, within_s=10)
    spooled.drainer.stop_after_batch()
    await draining
    assert_adds_up()


async def test_final_drain_stores_a_long_reply_before_it_ends(spooled: Spooled) -> None:
    spooled.write(long_reply(), captured("a"))
    await spooled.drainer.drain_rest()
    assert (await spooled.names(), spooled.letters()) == ({"long", "a"}, [])


def long_reply() -> CapturedCall:
    """Reading it takes place beside the drain."""
    reply = zlib.compress(whole(batch_writer.LONG_BYTES))
    return captured("long", reply=reply, reply_bytes=batch_writer.LONG_BYTES + 1, deflated=True)


ENDS_WHILE_READING = """
import asyncio, os, sys
from pathlib import Path
from proxy.ingester import transcribe
from proxy.ingester.drain import Drainer
from store.database import make_engine

read = transcribe.transcribe
def ends(call, *more):
    return os._exit(9) if call.episode == "long" else read(call, *more)
transcribe.transcribe = ends

async def drain():
    engine = make_engine(sys.argv[2])
    await Drainer(Path(sys.argv[1]), lambda: engine).drain_rest()

asyncio.run(drain())
"""


async def drain_and_end(spooled: Spooled) -> None:
    """Drain in a process that ends while it reads the long reply."""
    url = spooled.engine.url.render_as_string(hide_password=False)
    arguments = "-c", ENDS_WHILE_READING, str(spooled.folder), url
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    assert await process.wait() == 9


async def test_long_reply_becomes_a_dead_letter_after_three_ingesters_ended_while_reading_it(
    spooled: Spooled,
) -> None:
    spooled.write(captured("a"), long_reply())
    for _ in range(batch_writer.MOST_READINGS):
        await drain_and_end(spooled)
    await Drainer(spooled.folder, lambda: spooled.engine).drain_rest()
    assert await spooled.outcome() == (1, 1, [])
    assert "3 ingesters ended while they read its reply" in spooled.reasons()


async def test_long_reply_is_stored_after_an_ingester_ended_while_reading_it(
    spooled: Spooled,
) -> None:
    spooled.write(long_reply())
    await drain_and_end(spooled)
    await Drainer(spooled.folder, lambda: spooled.engine).drain_rest()
    assert await spooled.outcome() == (1, 0, [])
    assert list(spooled.folder.glob("*/*.begun")) == []


async def test_long_reply_waits_for_a_database_that_is_away(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, left = batch_writer.Ingester.store, [2 * batch_writer.MOST_READINGS]

    async def away(self: Any, engine: AsyncEngine, records: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise ConnectionRefusedError
        return await store(self, engine, records)

    monkeypatch.setattr(batch_writer.Ingester, "store", away)
    monkeypatch.setattr(drain, "RETRY_S", 0.02)
    spooled.write(long_reply())
    await spooled.drainer.drain_rest()
    while spooled.drainer.waiting_records:
        await spooled.drainer.drain_rest()
    assert await spooled.outcome() == (1, 0, [])
