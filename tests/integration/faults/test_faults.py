"""What goes wrong on either side, and what the other side sees of it: one decided behaviour each.

`docs/decisions/016-faults.md` has the table.
"""

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.integration.conftest import Proxy, StartProxy, running, settings_for
from tests.support.servers.raw_upstream import (
    APIS,
    CHAT,
    EVENTS,
    JSON,
    LAST,
    RawUpstream,
    chunked,
    parts,
    post,
    raw_ask,
    raw_upstream,
    says,
    sized,
    unchunked,
)

SILENCE_S = 2.0


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    async with raw_upstream() as server:
        yield server


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> AsyncIterator[Proxy]:
    """A proxy before a server that is not vLLM: it gets the client's own bytes."""
    async with start_proxy(silence_s=SILENCE_S) as found:
        yield found


ODD = b'{ "z":1.0,\t"a" :[9007199254740993,1e400,-0.0,1E+2],"b":"\xc3\xa9\\u00e9","new":{}}\n'
GZIP = b"Content-Encoding: gzip"
ZIPPED = gzip.compress(ODD, mtime=0)
STREAM = (
    b': ping\r\n\r\nevent: odd\ndata: {"id":"r","choices":[],"new":9007199254740993}\n\n',
    b'id: 7\nretry: 10\ndata:{ "x" : 1 }\ndata: second line\n\ndata: not json\n\n',
    b"data: [DONE]\n\n",
)
REPLIES = {
    "error": sized(b"500 Internal Server Error", b'{"error":{"message":"boom"}}', JSON, b"X-A: b"),
    "malformed": sized(b"400 Bad Request", b'{"error":"what?"}', JSON),
    "limited": sized(b"429 Slow Down", b"", b"Retry-After: 7", b"x-ratelimit-remaining: 0"),
    "balancer": sized(b"502 Bad Gateway", b"<html>\r\nbad\x00\xff", b"Content-Type: text/html"),
    "gzip": sized(b"200 OK", ZIPPED, JSON, GZIP, b"Vary: Accept-Encoding"),
    "gzip stream": sized(b"200 OK", ZIPPED, b"Content-Type: text/event-stream", GZIP),
    "large": sized(b"200 OK", b'{"x":"' + b"y" * 20 * 2**20 + b'"}', JSON),
    "odd json": sized(b"200 Fine", ODD, JSON, b"Set-Cookie: a=1", b"SET-cookie: b=2"),
    "list": sized(b"200 OK", b"[1,2]", JSON),
    "empty": sized(b"200 OK", b"", JSON),
    "no content": b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n",
    "redirect": sized(b"307 Temporary Redirect", b"moved", b"Location: http://127.0.0.1:1/"),
    "chunked": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" + chunked(ODD[:9], ODD[9:]) + b"0\r\n\r\n",
    "until close": b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + ODD,
    "announced": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + sized(b"200 OK", ODD, JSON),
    "stream": EVENTS + chunked(*STREAM) + b"0\r\n\r\n",
    "old stream": EVENTS + chunked(*(part.replace(b"\n", b"\r") for part in STREAM)) + LAST,
    "after the end": EVENTS + chunked(*STREAM, b": still here\n\n", b"data: {}\n\ndata: x") + LAST,
    "half an emoji": sized(b"200 OK", b'{"choices": [{"text": "\\ud83d"}], "x": 1E400 }', JSON),
    "no json": sized(b"200 OK", b'{"choices": [NaN, {"token_ids": 7}]} \xff', JSON),
}


@pytest.mark.parametrize("path", APIS)
async def test_reply_reaches_the_client_byte_for_byte(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    for name, reply in REPLIES.items():
        upstream.script = says(reply)
        request = post(path, APIS[path], b"Accept-Encoding: gzip", b"X-Mine: Yes")
        direct = parts(await raw_ask(upstream.port, request))
        proxied = parts(await raw_ask(proxy.port, request))
        if name in ("announced", "until close"):
            # A 1xx ends at the proxy, and it speaks for itself as HTTP/1.1.
            direct = parts(reply[reply.rindex(b"HTTP/1.") :].replace(b"HTTP/1.0", b"HTTP/1.1"))
        assert proxied == direct, name
        assert upstream.bodies[-1] == APIS[path]
    episodes = await proxy.episodes(len(REPLIES))
    calls = [call for episode in episodes for call in episode.calls]
    assert len(calls) == len(REPLIES)
    assert not any(call.trainable for call in calls)


async def test_reply_loses_only_the_token_ids_that_the_proxy_asked_for(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    async with AsyncExitStack() as exits:
        upstream = await exits.enter_async_context(raw_upstream("vllm"))
        settings = settings_for(database_url, upstream.url, tmp_path)
        await exits.enter_async_context(running(settings))
        port = int(settings.listen.rpartition(":")[2])
        for path in (CHAT, "/v1/completions"):
            for name, reply in REPLIES.items():
                if name in ("announced", "until close"):
                    continue
                upstream.script = says(reply)
                request = post(path, APIS[path], b"Accept-Encoding: gzip")
                direct = spelled(parts(await raw_ask(upstream.port, request)))
                assert spelled(parts(await raw_ask(port, request))) == direct, name


def spelled(reply: tuple[bytes, list[bytes], bytes]) -> Any:
    """A JSON object's keys in their order and numbers as they are written; else the bytes.

    Where ids are taken out of a reply, the blanks between its outermost fields may go too, and
    of a stream its content coding.
    """
    status, lines, body = reply
    if b"Content-Type: text/event-stream" in lines:
        if GZIP in lines:
            lines, body = [line for line in lines if line != GZIP], gzip.decompress(body)
        return status, lines, body.replace(b" ", b"")
    if body.startswith(b"{"):
        read = json.JSONDecoder(object_pairs_hook=list, parse_float=str, parse_int=str).decode
        with suppress(ValueError):
            return status, lines, read(body.decode())
    return reply


async def test_upstream_gets_the_clients_headers_in_their_case_and_order(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    mine = (b"X-B: 1", b"x-a: 2", b"X-B: 3", b"Authorization: Bearer k", b"Accept-Encoding: gzip")
    await raw_ask(proxy.port, post(CHAT + "?a=%2F", APIS[CHAT], *mine))
    first, *lines = upstream.heads[-1].split(b"\r\n")
    assert first == b"POST /v1/chat/completions?a=%2F HTTP/1.1"
    assert [line for line in lines if line in mine] == list(mine)
    assert b"Connection: close" not in lines


ERROR_EVENTS = {
    CHAT: b'data: {"error":{',
    "/v1/completions": b'data: {"error":{',
    "/v1/responses": b'event: error\ndata: {"type":"error"',
    "/v1/messages": b'event: error\ndata: {"type":"error"',
}


@pytest.mark.parametrize("path", APIS)
async def test_stream_broken_off_by_the_upstream_ends_truncated_after_its_apis_error_event(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    event = b'data: {"id":"r","choices":[]}\n\n'
    upstream.script = says(EVENTS + chunked(event), then="reset")
    body = APIS[path][:-1] + b',"stream":true}'
    reply = await raw_ask(proxy.port, post(path, body))
    _, _, framed = reply.partition(b"\r\n\r\n")
    content = unchunked(framed + b"0\r\n\r\n")
    assert content.startswith(event)
    assert content[len(event) :].startswith(ERROR_EVENTS[path])
    assert b"broke off" in content
    assert (await proxy.only_call()).status == "truncated"


@pytest.mark.parametrize("path", APIS)
async def test_whole_reply_broken_off_by_the_upstream_is_502_in_its_apis_error_format(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    """Nothing of it was passed on, so the client can still get an error."""
    upstream.script = says(sized(b"200 OK", ODD, JSON)[:-1], then="reset")
    reply = await raw_ask(proxy.port, post(path, APIS[path]))
    assert reply.startswith(b"HTTP/1.1 502 ")
    assert b"x-pawl-fault: upstream\r\n" in reply
    error = json.loads(parts(reply)[2])["error"]
    assert "broke off" in error["message"]
    assert error["type"] == ("api_error" if path == "/v1/messages" else "upstream_error")
    call = await proxy.only_call()
    assert (call.status, call.http_status, call.trainable) == ("truncated", 200, False)
    # What came is kept.
    async with proxy.engine.connect() as connection:
        kept = await connection.scalar(text("SELECT reply_raw FROM transitions"))
    assert kept == ODD[:-1]


async def test_call_to_an_unreachable_upstream_is_502_and_recorded(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings = settings_for(database_url, "http://127.0.0.1:1/v1", tmp_path)
    async with running(settings), aiohttp.ClientSession() as session:
        found = Proxy(settings, engine, session)
        for path, body in APIS.items():
            async with session.post(found.url + path, data=body) as response:
                error: Any = (await response.json())["error"]
                assert (response.status, response.headers["x-pawl-fault"]) == (502, "upstream")
                assert "PAWL_UPSTREAM_URL" in error["message"]
        calls = [call for episode in await found.episodes(4) for call in episode.calls]
        assert [call.status for call in calls] == ["upstream_error"] * 4
