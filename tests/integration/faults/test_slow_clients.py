"""Clients that do not get on, over real sockets: each is broken off, and costs nobody else."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.metrics import TOO_SLOW
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, proxy_with, settings_for
from tests.integration.faults.test_faults import APIS, CHAT, EVENTS, chunked, port_of
from tests.support.servers.raw_upstream import RawUpstream, post, raw_ask, raw_upstream
from tests.support.waiting import awaited

DEADLINE_S = 1.0
# A deadline, two sweeps, and what a busy machine takes.
BY_S = 15.0
MESSAGES = "/v1/messages"


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    async with raw_upstream() as server:
        yield server


@pytest.fixture
async def proxy(
    database_url: str, engine: AsyncEngine, upstream: RawUpstream, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy whose clients have a second for each step."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    settings = settings_for(database_url, upstream.url, tmp_path)
    short = {"head_s": DEADLINE_S, "body_s": DEADLINE_S, "write_s": DEADLINE_S}
    async with proxy_with(settings.model_copy(update=short), engine) as made:
        yield made


def too_slow(what: str) -> float:
    return float(TOO_SLOW.labels(what)._value.get())


async def dribble(port: int, data: bytes, at_once: int) -> bytes:
    """Send the first bytes, then one at a time; what comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data[:at_once])

    async def go_on() -> None:
        for byte in data[at_once:]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.2)

    going = asyncio.create_task(go_on())
    try:
        async with asyncio.timeout(BY_S):
            return await reader.read()
    finally:
        going.cancel()
        writer.close()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/embeddings"])
async def test_a_body_that_dribbles_is_408_in_the_shape_of_its_api(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    before = too_slow("body")
    request = post(path, b"x" * 500)
    answer = await dribble(port_of(proxy), request, len(request) - 490)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"x-pawl-fault: client" in head
    assert b"PAWL_BODY_S" in body
    assert body.startswith(b'{"type":"error",' if path == MESSAGES else b'{"error":{')
    assert too_slow("body") == before + 1
    assert upstream.bodies == []
    # What was passed on as it came is broken off, so that the upstream does not wait either.
    if path == "/v1/embeddings":
        await asyncio.wait_for(upstream.left.wait(), BY_S)


async def test_a_head_that_dribbles_is_408(proxy: Proxy) -> None:
    before = too_slow("head")
    answer = await dribble(port_of(proxy), post(CHAT, b"{}"), 20)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert too_slow("head") == before + 1


async def endless(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
    """A stream without an end."""
    await server.say(writer, EVENTS)
    while True:
        await server.say(writer, chunked(b"data: " + b"x" * 65_528 + b"\n\n"))


async def asleep(port: int, request: bytes) -> socket.socket:
    """Ask, and never read."""
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asking.setblocking(False)
    await asyncio.get_running_loop().sock_connect(asking, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(asking, request)
    return asking


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_reader_who_sleeps_is_torn_and_the_upstream_stopped(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    before = too_slow("write")
    upstream.script = endless
    sleeper = await asleep(port_of(proxy), post(path, APIS[CHAT]))
    await asyncio.wait_for(upstream.asked.wait(), BY_S)
    # A look at its list of models may have come and gone before.
    upstream.left.clear()
    await asyncio.wait_for(upstream.left.wait(), BY_S)
    assert too_slow("write") == before + 1
    sleeper.close()
    if path == CHAT:
        call = await proxy.only_call()
        assert call.status == "client_gone"


async def test_a_whole_reply_that_nobody_takes_is_let_go(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    before = too_slow("write")

    async def much(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        body = b'{"x":"' + b"y" * 16 * 2**20 + b'"}'
        await server.say(writer, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        await server.say(writer, body)

    upstream.script = much
    sleeper = await asleep(port_of(proxy), post(CHAT, APIS[CHAT]))

    async def let_go() -> float:
        return too_slow("write") - before

    assert await awaited(let_go) == 1
    sleeper.close()


async def test_others_are_answered_meanwhile(proxy: Proxy, upstream: RawUpstream) -> None:
    upstream.script = endless
    sleepers = [await asleep(port_of(proxy), post(CHAT, APIS[CHAT])) for _ in range(4)]
    answer = await raw_ask(port_of(proxy), post("/feedback", b"{"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    for sleeper in sleepers:
        sleeper.close()
