"""Who leaves, is silent or is slow: one decided behaviour each, as in `test_faults.py`."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.metrics import RECORDED
from tests.integration.conftest import Proxy
from tests.integration.faults.test_faults import (
    APIS,
    CHAT,
    ERROR_EVENTS,
    EVENTS,
    JSON,
    ODD,
    SILENCE_S,
    chunked,
    parts,
    port_of,
    proxy,
    proxy_before,
    sized,
    unchunked,
    upstream,
)
from tests.support.servers.raw_upstream import RawUpstream, post, raw_ask, says
from tests.support.waiting import PATIENCE_S, at_rest

__all__ = ["proxy", "upstream"]


@pytest.fixture
async def patient(
    database_url: str, engine: AsyncEngine, upstream: RawUpstream, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy that leaves an upstream only because its client has left."""
    async with proxy_before(upstream, 10 * PATIENCE_S, database_url, engine, tmp_path) as found:
        yield found


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("said", [b"", EVENTS + chunked(b'data: {"choices":[]}\n\n')])
async def test_a_client_that_leaves_stops_the_upstream(
    patient: Proxy, upstream: RawUpstream, said: bytes, half: bool
) -> None:
    """One that closes only its sending half has left too."""
    upstream.script = says(said, then="hang")
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(patient))
    writer.write(post(CHAT, APIS[CHAT]))
    await upstream.asked.wait()
    if said:
        await reader.readuntil(b"\r\n\r\n")
    upstream.left.clear()
    if half:
        writer.write_eof()
    else:
        writer.close()
    await asyncio.wait_for(upstream.left.wait(), PATIENCE_S)
    assert (await patient.only_call()).status == "client_gone"
    writer.close()


async def test_a_client_that_leaves_while_it_uploads(patient: Proxy, upstream: RawUpstream) -> None:
    """Half a request is no call: the upstream is not asked, and there is nothing to record."""
    recorded = RECORDED._value.get()
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(patient))
    writer.write(post(CHAT, APIS[CHAT])[:-1])
    # It arrives before the client leaves.
    await asyncio.sleep(0.1)
    writer.close()
    # What is passed on as it comes has begun there, and is broken off there.
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(patient))
    writer.write(post("/v1/embeddings", b"12345")[:-1])
    await upstream.asked.wait()
    upstream.left.clear()
    writer.close()
    await asyncio.wait_for(upstream.left.wait(), PATIENCE_S)
    assert [head.split()[1] for head in upstream.heads] == [b"/v1/embeddings"]
    assert upstream.bodies == []
    # Nothing is recorded a moment later either.
    await asyncio.sleep(0.3)
    assert RECORDED._value.get() == recorded


async def test_a_silent_upstream_is_504_before_the_head(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    upstream.script = says(then="hang")
    began = time.monotonic()
    response = await proxy.chat()
    assert SILENCE_S <= time.monotonic() - began < SILENCE_S + 10
    assert (response.status, response.headers["x-pawl-fault"]) == (504, "upstream")
    assert response.json["error"]["code"] == "upstream_silent"
    assert (await proxy.only_call()).status == "upstream_error"
    await asyncio.wait_for(upstream.left.wait(), PATIENCE_S)


async def test_a_silent_upstream_tears_what_has_begun(proxy: Proxy, upstream: RawUpstream) -> None:
    event = b'data: {"choices":[]}\n\n'
    upstream.script = says(EVENTS + chunked(event), then="hang")
    reply = await raw_ask(port_of(proxy), post(CHAT, APIS[CHAT]))
    content = unchunked(reply.partition(b"\r\n\r\n")[2] + b"0\r\n\r\n")
    assert content.startswith(event + ERROR_EVENTS[CHAT])
    assert b"silent" in content
    upstream.script = says(sized(b"200 OK", ODD, JSON)[:-1], then="hang")
    reply = await raw_ask(port_of(proxy), post(CHAT, APIS[CHAT]))
    assert reply.startswith(b"HTTP/1.1 502 ")
    assert b"silent" in reply
    calls = [call for episode in await proxy.episodes(2) for call in episode.calls]
    assert [call.status for call in calls] == ["truncated"] * 2


async def test_an_upstream_that_says_a_little_now_and_then_is_not_silent(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    pieces = [chunked(b": still thinking\n\n")] * 8 + [chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    upstream.script = says(EVENTS, *pieces, pause_s=0.2 * SILENCE_S)
    reply = await raw_ask(port_of(proxy), post(CHAT, APIS[CHAT]))
    assert unchunked(reply.partition(b"\r\n\r\n")[2]).endswith(b"data: [DONE]\n\n")


async def test_a_slow_uploader_is_waited_for(proxy: Proxy, upstream: RawUpstream) -> None:
    """Longer than the upstream may be silent: it is not the upstream who keeps us waiting."""
    for path in (CHAT, "/v1/embeddings"):
        request = post(path, APIS[CHAT])
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy))
        for at in range(5):
            cut = len(request) - 5 + at
            writer.write(request[:cut] if at == 0 else request[cut - 1 : cut])
            await asyncio.sleep(0.35 * SILENCE_S)
        writer.write(request[-1:])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert upstream.bodies[-1] == APIS[CHAT]


async def test_a_slow_reader_slows_the_upstream_down(proxy: Proxy, upstream: RawUpstream) -> None:
    line = b"data: " + b"x" * 65_528 + b"\n\n"
    lines = 512

    async def much(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        await server.say(writer, EVENTS)
        for _ in range(lines):
            await server.say(writer, chunked(line))
        await server.say(writer, chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    upstream.script = much
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy), limit=2**16)
    writer.write(post(CHAT, APIS[CHAT]))
    await reader.readuntil(b"\r\n\r\n")
    # The sockets' buffers and ours are full; nothing more is taken from the upstream for a second.
    assert await at_rest(lambda: upstream.said, 1.0) < lines * len(line) / 2
    received = bytearray()
    while data := await reader.read(2**20):
        received += data
    writer.close()
    assert len(unchunked(bytes(received))) == lines * len(line) + len(b"data: [DONE]\n\n")


async def test_a_refused_upload_reads_why(proxy: Proxy, upstream: RawUpstream) -> None:
    """The answer arrives although the client is still sending."""
    _, writer = pair = await asyncio.open_connection("127.0.0.1", port_of(proxy))
    body = b"x" * (8 * 2**20)
    writer.write(post(CHAT, body))
    reply = await pair[0].read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert json.loads(parts(reply)[2])["error"]["type"] == "invalid_request_error"
    assert upstream.heads == []
