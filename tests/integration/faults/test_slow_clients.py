"""Peers that leave, are silent or are slow: each is broken off, and costs nobody else."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from proxy.metrics import RECORDED, REFUSED
from tests.integration.conftest import Proxy, StartProxy
from tests.integration.faults.test_faults import (
    ERROR_EVENTS,
    ODD,
    SILENCE_S,
    proxy,
    upstream,
)
from tests.support.servers.raw_upstream import (
    APIS,
    CHAT,
    EVENTS,
    JSON,
    RawUpstream,
    asleep,
    chunked,
    endless,
    parts,
    post,
    raw_ask,
    says,
    sized,
    unchunked,
)
from tests.support.waiting import PATIENCE_S, awaited

__all__ = ["proxy", "upstream"]

DEADLINE_S = 1.0
# A deadline, two sweeps, and what a busy machine takes.
BY_S = 15.0
MESSAGES = "/v1/messages"


@pytest.fixture
async def patient(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    """A proxy that leaves an upstream only because its client has left."""
    async with start_proxy(silence_s=10 * PATIENCE_S) as found:
        yield found


@pytest.fixture
async def impatient(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    """A proxy whose clients have a second for each step."""
    async with start_proxy(head_s=DEADLINE_S, body_s=DEADLINE_S, write_s=DEADLINE_S) as found:
        yield found


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("begun", [b"", EVENTS + chunked(b'data: {"choices":[]}\n\n')])
async def test_client_that_disconnects_stops_the_upstream_request(
    patient: Proxy, upstream: RawUpstream, begun: bytes, half: bool
) -> None:
    """One that closes only its sending half has left too."""
    upstream.script = says(begun, then="hang")
    reader, writer = await asyncio.open_connection("127.0.0.1", patient.port)
    writer.write(post(CHAT, APIS[CHAT]))
    await upstream.asked.wait()
    if begun:
        await reader.readuntil(b"\r\n\r\n")
    upstream.left.clear()
    if half:
        writer.write_eof()
    else:
        writer.close()
    await asyncio.wait_for(upstream.left.wait(), PATIENCE_S)
    assert (await patient.only_call()).status == "client_gone"
    writer.close()


async def test_call_that_its_client_abandons_during_the_upload_is_not_recorded(
    patient: Proxy, upstream: RawUpstream
) -> None:
    """Half a request is no call: the upstream is not asked, and there is nothing to record."""
    recorded = RECORDED._value.get()
    _, writer = await asyncio.open_connection("127.0.0.1", patient.port)
    writer.write(post(CHAT, APIS[CHAT])[:-1])
    # It arrives before the client leaves.
    await asyncio.sleep(0.1)
    writer.close()
    # What is passed on as it comes has begun there, and is broken off there.
    _, writer = await asyncio.open_connection("127.0.0.1", patient.port)
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


async def test_upstream_that_sends_no_response_head_in_time_is_504(
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


async def test_upstream_silent_in_mid_reply_ends_a_stream_with_an_error_and_a_whole_with_502(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    event = b'data: {"choices":[]}\n\n'
    upstream.script = says(EVENTS + chunked(event), then="hang")
    reply = await raw_ask(proxy.port, post(CHAT, APIS[CHAT]))
    content = unchunked(reply.partition(b"\r\n\r\n")[2] + b"0\r\n\r\n")
    assert content.startswith(event + ERROR_EVENTS[CHAT])
    assert b"silent" in content
    upstream.script = says(sized(b"200 OK", ODD, JSON)[:-1], then="hang")
    reply = await raw_ask(proxy.port, post(CHAT, APIS[CHAT]))
    assert reply.startswith(b"HTTP/1.1 502 ")
    assert b"silent" in reply
    calls = [call for episode in await proxy.episodes(2) for call in episode.calls]
    assert [call.status for call in calls] == ["truncated"] * 2


async def test_upstream_that_sends_a_little_now_and_then_is_not_silent(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    pieces = [chunked(b": still thinking\n\n")] * 8 + [chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    upstream.script = says(EVENTS, *pieces, pause_s=0.2 * SILENCE_S)
    reply = await raw_ask(proxy.port, post(CHAT, APIS[CHAT]))
    assert unchunked(reply.partition(b"\r\n\r\n")[2]).endswith(b"data: [DONE]\n\n")


async def test_slow_uploader_is_waited_for(proxy: Proxy, upstream: RawUpstream) -> None:
    """Longer than the upstream may be silent: it is not the upstream who keeps us waiting."""
    for path in (CHAT, "/v1/embeddings"):
        request = post(path, APIS[CHAT])
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for at in range(5):
            cut = len(request) - 5 + at
            writer.write(request[:cut] if at == 0 else request[cut - 1 : cut])
            await asyncio.sleep(0.35 * SILENCE_S)
        writer.write(request[-1:])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert upstream.bodies[-1] == APIS[CHAT]


async def test_client_gets_413_while_it_still_uploads_a_too_large_body(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    """The answer arrives although the client is still sending."""
    _, writer = pair = await asyncio.open_connection("127.0.0.1", proxy.port)
    body = b"x" * (8 * 2**20)
    writer.write(post(CHAT, body))
    reply = await pair[0].read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert json.loads(parts(reply)[2])["error"]["type"] == "invalid_request_error"
    assert upstream.heads == []


def too_slow(what: str) -> float:
    return float(REFUSED.labels(f"slow_{what}")._value.get())


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
async def test_request_body_sent_too_slowly_is_408_in_its_apis_error_format(
    impatient: Proxy, upstream: RawUpstream, path: str
) -> None:
    before = too_slow("body")
    request = post(path, b"x" * 500)
    answer = await dribble(impatient.port, request, len(request) - 490)
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


async def test_request_head_sent_too_slowly_is_408(impatient: Proxy) -> None:
    before = too_slow("head")
    answer = await dribble(impatient.port, post(CHAT, b"{}"), 20)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert too_slow("head") == before + 1


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_client_that_stops_reading_is_cut_off_and_its_upstream_request_stopped(
    impatient: Proxy, upstream: RawUpstream, path: str
) -> None:
    before = too_slow("write")
    upstream.script = endless
    sleeper = await asleep(impatient.port, post(path, APIS[CHAT]))
    await asyncio.wait_for(upstream.asked.wait(), BY_S)
    # A look at its list of models may have come and gone before.
    upstream.left.clear()
    await asyncio.wait_for(upstream.left.wait(), BY_S)
    assert too_slow("write") == before + 1
    sleeper.close()
    if path == CHAT:
        call = await impatient.only_call()
        assert call.status == "client_gone"


async def test_whole_reply_that_its_client_does_not_read_is_given_up(
    impatient: Proxy, upstream: RawUpstream
) -> None:
    before = too_slow("write")

    async def much(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        body = b'{"x":"' + b"y" * 16 * 2**20 + b'"}'
        await server.say(writer, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        await server.say(writer, body)

    upstream.script = much
    sleeper = await asleep(impatient.port, post(CHAT, APIS[CHAT]))

    async def let_go() -> float:
        return too_slow("write") - before

    assert await awaited(let_go) == 1
    sleeper.close()


async def test_other_clients_are_answered_while_some_clients_read_nothing(
    impatient: Proxy, upstream: RawUpstream
) -> None:
    upstream.script = endless
    sleepers = [await asleep(impatient.port, post(CHAT, APIS[CHAT])) for _ in range(4)]
    answer = await raw_ask(impatient.port, post("/feedback", b"{"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    for sleeper in sleepers:
        sleeper.close()
