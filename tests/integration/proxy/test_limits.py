"""Too deep, too large or unstorable: such requests are refused, such replies kept as bytes."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from sqlalchemy import text

from store.values.documents import MAX_DEPTH
from tests.integration.conftest import Proxy, Reply
from tests.support.faults.stand import Stand, standing
from tests.support.servers.fake_upstream import DONE, FakeUpstream, answers, streams, whole_reply
from tests.support.waiting import eventually, until

APIS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
CHAT = APIS[0]
JSON = {"Content-Type": "application/json"}
DEAD = "pawl_records_dead_lettered_total"
# What a worker may grow to under hostile requests, bytes, and how many come at once.
MOST_RESIDENT = 300 * 10**6
AT_ONCE = 16
# Four million chunks each take a core seconds to read. A worker that keeps each chunk as an object
# needs 20 times the bytes, and so more than `MOST_RESIDENT` for two.
TINY_CHUNKS, AT_ONCE_OF_CHUNKS = "chunks of 2 bytes", 2
BODY = 8 * 2**20


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def asking(depth: int) -> bytes:
    """Return a chat request whose `stop` is lists, nested `depth` deep below the top level."""
    said = b'{"model":"m","messages":[{"role":"user","content":"q"}],"stop":%b}'
    return said % nested(depth)


async def send(proxy: Proxy, path: str, body: bytes) -> Reply:
    return await proxy.ask("POST", path, data=BytesIO(body))


async def counted(proxy: Proxy, name: str) -> float:
    """A counter, which goes on from one test to the next."""
    return (await proxy.counters())[name]


@pytest.mark.parametrize("depth", [MAX_DEPTH, 979, 1100, 5000])
async def test_request_that_nests_too_deep_is_refused(
    proxy: Proxy, upstream: FakeUpstream, depth: int
) -> None:
    before = await counted(proxy, "pawl_records_total")
    for path in (*APIS, "/feedback"):
        reply = await asyncio.wait_for(send(proxy, path, asking(depth)), 10)
        assert (reply.status, reply.headers["x-pawl-fault"]) == (400, "client"), path
        assert f"{MAX_DEPTH} deep" in reply.json["error"]["message"]
        assert (reply.json.get("type") == "error") == (path == "/v1/messages")
    assert (upstream.requests, upstream.other) == ([], [])
    assert await counted(proxy, "pawl_records_total") == before


async def test_json_inside_a_requests_string_may_nest_at_any_depth(proxy: Proxy) -> None:
    """Claude Code tells its session in such a string."""
    reply = await proxy.chat(metadata={"user_id": '{"a":' * 5000})
    assert reply.status == 200
    assert (await proxy.only_call()).method == "own"


async def test_request_at_the_nesting_limit_is_answered_and_trainable(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    assert (await send(proxy, CHAT, asking(MAX_DEPTH - 1))).status == 200
    assert (await proxy.only_call()).trainable
    assert upstream.requests


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("depth", [150, 979, 1100, 5000])
async def test_reply_that_nests_too_deep_is_passed_on_and_recorded_as_bytes(
    proxy: Proxy, upstream: FakeUpstream, depth: int, streamed: bool
) -> None:
    deep = b'"reasoning":' + nested(depth)
    message = b'{"content":"hi",%b}' % deep
    choice = b'{"index":0,"%b":%b,"finish_reason":"stop"}'
    reply = b'{"id":"chatcmpl-1","choices":[%b]}'
    if streamed:
        event = b"data: %b\n\n" % (reply % (choice % (b"delta", message)))
        upstream.behave = streams(event, DONE)
    else:
        upstream.behave = answers(reply % (choice % (b"message", message)), **JSON)
    seen = await proxy.chat(stream=streamed)
    assert seen.status == 200
    assert deep in seen.body
    call = await proxy.only_call()
    assert (call.reply, call.trainable, call.reason) == (None, False, "nested_too_deep")
    async with proxy.engine.connect() as connection:
        kept = await connection.execute(text("SELECT reply_raw, response_id FROM transitions"))
        [(raw, response_id)] = kept
    assert deep in raw
    if not streamed and depth < 900:
        assert response_id == "chatcmpl-1"


async def test_call_with_tool_arguments_nested_too_deep_is_answered_and_recorded_without_reply(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    """They come as a string, which Anthropic's API has as an object."""
    before = await counted(proxy, DEAD)
    for depth in (150, 979, 2000):
        function = {"name": "f", "arguments": '{"a":' + nested(depth).decode() + "}"}
        tool = {"index": 0, "id": "call_1", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [tool]}
        whole = {"id": "c", "model": "m", "choices": [{"index": 0, "message": message}]}
        deltas = ({"role": "assistant"}, message)
        events = [
            {"id": "c", "model": "m", "choices": [{"index": 0, "delta": one}]} for one in deltas
        ]
        events.append({"id": "c", "choices": [], "usage": {}})
        pieces = [b"data: %b\n\n" % json.dumps(event).encode() for event in events]
        for stream, behave in ((False, answers(whole)), (True, streams(*pieces, DONE))):
            upstream.behave = behave
            asked = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
            reply = await proxy.ask("POST", APIS[3], model="m", stream=stream, **asked)
            assert reply.status == 200
    calls = [call for episode in await proxy.episodes(6) for call in episode.calls]
    assert {(call.reply, call.reason) for call in calls} == {(None, "nested_too_deep")}
    assert await counted(proxy, DEAD) == before


async def test_request_with_too_many_json_values_is_refused_before_it_is_parsed(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    body = b'{"model":"m","messages":[' + b"{}," * 120_000 + b"{}]}"
    for path in APIS:
        reply = await send(proxy, path, body)
        assert (reply.status, reply.headers["x-pawl-fault"]) == (413, "client"), path
        assert "more than 100000 lists" in reply.json["error"]["message"]
    assert not upstream.requests


async def test_commas_and_brackets_inside_a_string_do_not_count_as_json_values(
    proxy: Proxy,
) -> None:
    content = '[],"' * 150_000
    assert (await proxy.chat(messages=[{"role": "user", "content": content}])).status == 200


async def test_long_request_body_is_recorded_as_a_trainable_call(proxy: Proxy) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    reply = await proxy.chat(messages=turns * 4000, headers={"x-pawl-episode": "long"})
    assert reply.status == 200
    follow = [*(turns * 4000), {"role": "assistant", "content": "hi"}]
    assert (await proxy.chat(messages=[*follow, turns[0]])).status == 200
    episodes = await proxy.episodes(2)
    assert all(call.trainable for e in episodes for call in e.calls)


async def test_feedback_body_has_a_size_limit_of_its_own(proxy: Proxy) -> None:
    limit = proxy.settings.max_feedback_kb * 1024
    reply = await send(proxy, "/feedback", b"[" + b" " * limit)
    assert reply.status == 413
    assert "PAWL_MAX_FEEDBACK_KB" in reply.json["error"]["message"]

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(limit // 4096 + 2):
            yield b" " * 4096

    assert (await proxy.ask("POST", "/feedback", data=chunks())).status == 413
    many = [{"value": 1, "episode": f"episode {n}" + "x" * 60} for n in range(10_000)]
    assert (await proxy.feedback(many))[0] == 202
    assert (await proxy.feedback([{"value": 1, "episode": "e", "a": []}] * 9_000))[0] == 400


async def test_request_beyond_the_memory_budget_is_503_with_retry_after(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()

    async def behave(_: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response(whole_reply(upstream.requests[-1], 1))

    upstream.behave = behave
    large = [{"role": "user", "content": "x" * 1_040_000}]
    statuses: list[int] = []

    async def ask() -> None:
        reply = await proxy.chat(messages=large)
        statuses.append(reply.status)
        if reply.status == 503:
            assert reply.headers["Retry-After"] == "1"
            assert reply.headers["x-pawl-fault"] == "proxy"
            assert "PAWL_IN_FLIGHT_MB" in reply.json["error"]["message"]

    room = proxy.settings.in_flight_mb * 2**20 // (4 * 1_040_000)
    asked = [asyncio.create_task(ask()) for _ in range(room + 8)]
    await until(lambda: len(statuses) >= 8)
    # A small one is let in beside them all.
    small = asyncio.create_task(proxy.chat())
    await until(lambda: any(len(str(r)) < 1000 for r in upstream.requests))
    go_on.set()
    await asyncio.gather(*asked)
    assert (await small).status == 200
    assert statuses.count(503) in range(8, 12)

    async def is_empty() -> bool:
        return await counted(proxy, "pawl_in_flight_bytes") == 0

    await eventually(is_empty)


@pytest.mark.parametrize("name", ["m\x00", "\x00" * 3000, "m" * 4000, "ü\x00"])
async def test_any_name_of_a_model_is_stored(proxy: Proxy, name: str) -> None:
    await proxy.chat(model=name)
    call = await proxy.only_call()
    assert call.request is not None
    assert json.loads(call.request)["model"] == name
    async with proxy.engine.connect() as connection:
        kept = await connection.execute(text("SELECT served_model FROM transitions"))
        assert kept.scalar() == name.replace("\x00", "\\u0000")


@pytest.mark.parametrize("name", ["r\x00", "r" * 5000, "\U0001f600" * 1024])
async def test_any_id_of_a_reply_is_stored(proxy: Proxy, upstream: FakeUpstream, name: str) -> None:
    reply = whole_reply({}, 1) | {"id": name}
    reply["choices"][0]["finish_reason"] = "stop\x00"
    upstream.behave = answers(reply)
    before = await counted(proxy, DEAD)
    await proxy.chat()
    call = await proxy.only_call()
    assert call.reply is not None
    assert json.loads(call.reply)["id"] == name
    assert await counted(proxy, DEAD) == before


async def test_overlong_target_name_in_feedback_is_refused_and_a_shorter_name_stored(
    proxy: Proxy,
) -> None:
    # Not one character twice: PostgreSQL would compress an index row that repeats itself.
    wide = "".join(chr(0x20000 + number) for number in range(1024))
    before = await proxy.counters()
    for kind in ("episode", "response"):
        status, told = await proxy.feedback({"value": 1, kind: wide})
        assert status == 400
        assert told["error"]["param"] == kind
        assert "2048 bytes" in told["error"]["message"]
        assert (await proxy.feedback({"value": 1, kind: wide[:512]}))[0] == 202
    words = {"metric": "tool_status", "value": "ok", "episode": "e"}
    assert (await proxy.feedback(words | {"id": wide, "name": wide, "detail": wide}))[0] == 202
    assert (await proxy.feedback({"value": 1, "episode": "e", "metric": wide}))[0] == 202
    for field in ("id", "name", "detail", "metric"):
        status, told = await proxy.feedback(words | {field: "\x00"})
        assert status == 400, field

    async def settled() -> bool:
        now = await proxy.counters()
        assert now[DEAD] == before[DEAD]
        return now["pawl_records_stored_total"] == before["pawl_records_stored_total"] + 4

    await eventually(settled)


def sized(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(path: str, body: bytes, size: int, trailers: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head + chunks + b"0\r\n" + trailers + b"\r\n"


MESSAGES = b'{"model":"m","messages":['
TEXT = MESSAGES + b'{"role":"user","content":"' + b"word " * (BODY // 5) + b'"}]}'
HOSTILE = {
    "24 MB of trailers": lambda: chunked(
        CHAT, MESSAGES + b"{}]}", 2**16, (b"t: " + b"x" * 1000 + b"\r\n") * (3 * BODY // 1005)
    ),
    TINY_CHUNKS: lambda: chunked(CHAT, TEXT, 2),
    "8 MB of messages": lambda: sized(CHAT, MESSAGES + b'{"":0},' * (BODY // 7) + b"{}]}"),
    "8 MB of empty lists": lambda: sized("/feedback", b"[" + b"[]," * (BODY // 3) + b"[]]"),
    "5,000 deep": lambda: sized(CHAT, asking(5000)),
}


async def send_raw(port: int, request: bytes) -> None:
    """Send a request, and wait for its answer or its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # A server that refuses early closes while the client still sends.
    with suppress(ConnectionError):
        writer.write(request)
        await writer.drain()
    with suppress(ConnectionError):
        await reader.read(4096)
    writer.close()


@asynccontextmanager
async def highest_memory(process: psutil.Process) -> AsyncIterator[list[int]]:
    """Watch a process's resident bytes in a thread; the list's one item is the most so far."""
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    yield most
    is_over.set()
    await asyncio.to_thread(thread.join)


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
def test_memory_of_a_worker_stays_bounded_under_hostile_requests(tmp_path: Path) -> None:
    async def attack(stand: Stand) -> None:
        await stand.ready()
        for kind, made in HOSTILE.items():
            request = made()
            # A new worker has no memory that another kind made it take.
            await stand.kill("worker", 0)
            [worker] = stand.processes("worker")
            async with highest_memory(worker) as most:
                at_once = AT_ONCE_OF_CHUNKS if kind == TINY_CHUNKS else AT_ONCE
                await asyncio.gather(*(send_raw(stand.port, request) for _ in range(at_once)))
            assert most[0] < MOST_RESIDENT, kind
            assert worker.is_running()

    with standing(tmp_path, workers=1) as stand:
        asyncio.run(attack(stand))
