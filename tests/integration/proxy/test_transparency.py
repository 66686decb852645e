"""What a client sees of an upstream that is asked for ids, or that does not do as it should."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.values.packing import unpack_ids
from tests.integration.conftest import Proxy, StartProxy, running, settings_for
from tests.support.servers.listening import listening
from tests.support.servers.raw_upstream import (
    APIS,
    CHAT,
    EVENTS,
    JSON,
    LAST,
    RawUpstream,
    Script,
    chunked,
    parts,
    post,
    raw_ask,
    raw_upstream,
    says,
    sized,
)

MESSAGES = "/v1/messages"


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    """A server that gives ids."""
    async with raw_upstream("vllm") as server:
        yield server


@asynccontextmanager
async def asking(
    proxy: Proxy, path: str, body: bytes, *headers: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    """Ask, and read the answer as it comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(post(path, body, *headers))
    yield reader
    writer.close()


async def answered(proxy: Proxy, path: str, body: bytes) -> bytes:
    return await raw_ask(proxy.port, post(path, body))


def chunk(content: str, token: int, **more: Any) -> bytes:
    entry = {"token": content, "logprob": -1.0}
    choice = {"index": 0, "delta": {"content": content}, "logprobs": {"content": [entry]}}
    choice |= {"finish_reason": None, "token_ids": [token]} | more
    told = {"id": "c", "model": "m", "choices": [choice], "prompt_token_ids": [1, 2]}
    return b"data: %b\n\n" % json.dumps(told, separators=(",", ":")).encode()


STREAM = (chunk("a", 77701), chunk("b", 77702, finish_reason="stop"), b"data: [DONE]\n\n")
SEEN = (
    b"".join(STREAM)
    .replace(b"[77701]", b"null")
    .replace(b"[77702]", b"null")
    .replace(b"[1,2]", b"null")
    .replace(b'{"content":[{"token":"a","logprob":-1.0}]}', b"null")
    .replace(b'{"content":[{"token":"b","logprob":-1.0}]}', b"null")
)
WHOLE = (
    b'{"id":"c","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ab"},'
    b'"logprobs":{"content":[{"logprob":-1.0},{"logprob":-1.0}]},"finish_reason":"stop",'
    b'"token_ids":[77701,77702]}],"prompt_token_ids":[1,2]}'
)
CODED = EVENTS.replace(b"\r\n\r\n", b"\r\nContent-Encoding: %b\r\n\r\n")
STREAMED = APIS[CHAT][:-1] + b',"stream":true}'


def lingers(said: bytes, until: asyncio.Event, then: bytes) -> Script:
    async def script(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        await server.say(writer, said)
        await until.wait()
        await server.say(writer, then)
        writer.close()

    return script


def coded(pieces: tuple[bytes, ...], wbits: int) -> list[bytes]:
    """Each piece can be read as soon as it is there."""
    engine = zlib.compressobj(wbits=wbits)
    sent = [engine.compress(piece) + engine.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]
    return [*sent, engine.flush()]


@pytest.mark.parametrize(
    ("coding", "wbits"), [(b"gzip", 31), (b"X-Gzip", 31), (b"deflate", 15), (b"deflate", -15)]
)
async def test_compressed_stream_is_decoded_piece_by_piece(
    proxy: Proxy, upstream: RawUpstream, coding: bytes, wbits: int
) -> None:
    """Identity was asked for; a server or balancer that compresses all the same shows no ids."""
    goes_on = asyncio.Event()
    pieces = [chunked(piece) for piece in coded(STREAM, wbits)]

    upstream.script = lingers(CODED % coding + pieces[0], goes_on, b"".join(pieces[1:]) + LAST)
    async with asking(proxy, CHAT, STREAMED, b"Accept-Encoding: gzip") as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-encoding" not in head.lower()
        await asyncio.wait_for(reader.readuntil(b'"content":"a"'), 5)
        goes_on.set()
        rest = await reader.read()
    assert b"7770" not in rest
    assert rest.endswith(LAST)
    call = await proxy.only_call()
    assert (call.status, call.trainable) == ("complete", True)
    assert unpack_ids(call.tokens.sampled_ids) == [77701, 77702]
    assert b"\naccept-encoding: identity" in upstream.heads[-1].lower()


async def test_gzip_and_plain_streams_reach_the_client_as_the_same_bytes(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    for sent in (
        EVENTS + chunked(*STREAM) + LAST,
        CODED % b"gzip" + chunked(gzip.compress(b"".join(STREAM))) + LAST,
        # Members one after another are one file.
        CODED % b"gzip" + chunked(*map(gzip.compress, STREAM)) + LAST,
    ):
        upstream.script = says(sent)
        assert parts(await answered(proxy, CHAT, STREAMED))[2] == SEEN


async def test_compressed_whole_reply_reaches_the_client_decoded_and_without_token_ids(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    sent = sized(b"200 OK", gzip.compress(WHOLE), JSON, b"Content-Encoding: gzip")
    upstream.script = says(sent)
    _, lines, body = parts(await answered(proxy, CHAT, APIS[CHAT]))
    assert b"Content-Encoding: gzip" not in lines
    choice = json.loads(body)["choices"][0]
    assert (choice["token_ids"], choice["logprobs"]) == (None, None)
    assert (await proxy.only_call()).trainable


@pytest.mark.parametrize(
    "sent",
    [
        CODED % b"gzip" + chunked(b"\x1f\x8b no gzip") + LAST,
        CODED % b"gzip" + chunked(gzip.compress(b"".join(STREAM))[:-20]) + LAST,
        sized(b"200 OK", gzip.compress(WHOLE)[:-20], JSON, b"Content-Encoding: gzip"),
        sized(b"200 OK", WHOLE, JSON, b"Content-Encoding: br"),
    ],
)
async def test_undecodable_reply_does_not_reach_the_client(
    proxy: Proxy, upstream: RawUpstream, sent: bytes
) -> None:
    upstream.script = says(sent)
    reply = await answered(proxy, CHAT, APIS[CHAT])
    # Not in the head: the id of a call may have the same digits.
    assert b"7770" not in reply.partition(b"\r\n\r\n")[2]
    if sent.startswith(CODED[:40]):
        assert b"content coding" in reply
        assert not reply.endswith(LAST)
    else:
        assert reply.startswith(b"HTTP/1.1 502 ")
        assert b"x-pawl-fault: upstream" in reply
    assert not (await proxy.only_call()).trainable


async def test_error_reply_in_an_unknown_content_encoding_is_passed_on_unchanged(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    upstream.script = says(sized(b"503 Busy", b"\x0b\x02", b"Content-Encoding: br"))
    status, lines, body = parts(await answered(proxy, CHAT, APIS[CHAT]))
    assert (status, body) == (b"HTTP/1.1 503 Busy", b"\x0b\x02")
    assert b"Content-Encoding: br" in lines


# a stream's end


ENDS = {
    CHAT: b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed",'
    b'"response":{"id":"r","model":"m","output":[]}}\n\n',
    MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}


@pytest.mark.parametrize("path", APIS)
async def test_stream_ends_for_the_client_before_the_upstream_closes(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    """It leaves when the record is durable; what follows goes on as it comes."""
    upstream.owned_by = "somebody"
    goes_on = asyncio.Event()
    after = b": goodbye\n\ndata: more"
    upstream.script = lingers(EVENTS + chunked(ENDS[path]), goes_on, chunked(after) + LAST)
    async with asking(proxy, path, APIS[path][:-1] + b',"stream":true}') as reader:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(ENDS[path]), 5)
        assert (await proxy.only_call()).status == "complete"
        goes_on.set()
        rest = await asyncio.wait_for(reader.read(), 5)
    assert b": goodbye" in rest
    assert rest.endswith(LAST)


async def test_translated_messages_stream_ends_before_the_upstreams_close(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    goes_on = asyncio.Event()
    upstream.script = lingers(EVENTS + chunked(*STREAM), goes_on, chunked(b": goodbye\n\n") + LAST)
    async with asking(proxy, MESSAGES, APIS[MESSAGES][:-1] + b',"stream":true}') as reader:
        await asyncio.wait_for(reader.readuntil(b'{"type":"message_stop"}\n\n'), 5)
        goes_on.set()
        assert (await reader.read()).endswith(LAST)
    assert (await proxy.only_call()).trainable


async def test_token_ids_after_a_streams_end_are_hidden_too(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    goes_on = asyncio.Event()
    upstream.script = lingers(EVENTS + chunked(*STREAM), goes_on, chunked(chunk("c", 77703)) + LAST)
    async with asking(proxy, CHAT, STREAMED) as reader:
        await proxy.only_call()
        goes_on.set()
        reply = await reader.read()
    assert b'"content":"c"' in reply
    assert b"7770" not in reply.partition(b"\r\n\r\n")[2]


async def test_upstream_connection_that_ends_its_stream_late_is_reused(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(size)
            writer.write(EVENTS + chunked(b"data: [DONE]\n\n"))
            await asyncio.sleep(0.2)
            writer.write(LAST)

    async with listening(serve) as port:
        settings = settings_for(database_url, f"http://127.0.0.1:{port}/v1", tmp_path)
        async with running(settings), aiohttp.ClientSession() as session:
            url = f"http://{settings.listen}{CHAT}"
            for _ in range(3):
                async with session.post(url, data=b'{"stream":true}') as response:
                    assert await response.read() == b"data: [DONE]\n\n"
    assert connections == 1


async def test_forwarded_streams_head_does_not_wait_for_its_first_event(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    goes_on = asyncio.Event()
    upstream.script = lingers(EVENTS, goes_on, chunked(b"data: x\n\n") + LAST)
    async with asking(proxy, "/v1/embeddings", b"{}") as reader:
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        goes_on.set()
        assert (await reader.read()).endswith(LAST)


@pytest.mark.parametrize("allowed", [False, True])
async def test_request_to_delete_a_model_is_passed_on_only_if_a_setting_allows_it(
    start_proxy: StartProxy, upstream: RawUpstream, allowed: bool
) -> None:
    upstream.script = says(sized(b"200 OK", b'{"deleted":true}', JSON))
    async with start_proxy(allow_model_delete=allowed) as proxy:
        request = post("/v1/models/m", b"").replace(b"POST", b"DELETE", 1)
        reply = await raw_ask(proxy.port, request)
    assert reply.startswith(b"HTTP/1.1 200 OK" if allowed else b"HTTP/1.1 403 ")
    assert len(upstream.heads) == int(allowed)
    if not allowed:
        assert b"x-pawl-fault: client" in reply
        error = json.loads(parts(reply)[2])["error"]
        assert "PAWL_ALLOW_MODEL_DELETE" in error["message"]
        assert error["code"] == "model_delete_not_allowed"


# errors


@pytest.mark.parametrize("path", APIS)
async def test_relayed_errors_name_the_upstream_and_have_the_shape_of_the_clients_api(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    for status, kind in ((404, "not_found_error"), (503, "overloaded_error")):
        said = {"message": "no", "type": "BadRequestError", "param": None, "code": status}
        body = json.dumps({"error": said}).encode()
        upstream.script = says(sized(b"%d No" % status, body, JSON))
        reply = await answered(proxy, path, APIS[path])
        assert reply.startswith(b"HTTP/1.1 %d No\r\n" % status)
        assert reply.lower().count(b"x-pawl-fault: upstream\r\n") == 1
        seen = parts(reply)[2]
        if path == MESSAGES:
            wanted = {"type": "error", "error": {"type": kind, "message": "no"}}
            assert json.loads(seen) == wanted
        else:
            assert seen == body


async def test_proxys_own_errors_on_v1_messages_have_anthropics_format(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    upstream.script = says(sized(b"200 OK", WHOLE, JSON)[:-1], then="reset")
    large = b'{"model":"' + b"x" * (8 * 2**20) + b'"}'
    for body, status, kind in (
        (large, 413, b"request_too_large"),
        (APIS[MESSAGES], 502, b"api_error"),
    ):
        reply = await answered(proxy, MESSAGES, body)
        assert reply.startswith(b"HTTP/1.1 %d " % status)
        assert b'{"type":"error","error":{"type":"%b"' % kind in reply


async def test_errors_of_a_server_that_speaks_anthropics_api_are_passed_on_untouched(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    upstream.owned_by = "anthropic"
    body = b'{"type":"error", "error":{"type":"some_new_error","message":"no"},"request_id":"r"}'
    upstream.script = says(sized(b"400 No", body, JSON))
    assert parts(await answered(proxy, MESSAGES, APIS[MESSAGES]))[2] == body


async def test_forwarded_reply_that_breaks_off_is_502_until_it_has_begun(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    upstream.script = says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", then="reset")
    reply = await answered(proxy, "/v1/embeddings", b"{}")
    assert reply.startswith(b"HTTP/1.1 502 ")
    assert b"x-pawl-fault: upstream\r\n" in reply
    assert b"broke off" in reply
    # What has begun can only be torn.
    upstream.script = says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", then="reset")
    assert (await answered(proxy, "/v1/embeddings", b"{}")).endswith(b"\r\n\r\nabc")
    upstream.script = says(sized(b"404 Nope", b"{}", JSON))
    reply = await answered(proxy, "/v1/embeddings", b"{}")
    assert reply.startswith(b"HTTP/1.1 404 Nope\r\n")
    assert b"x-pawl-fault: upstream\r\n" in reply
