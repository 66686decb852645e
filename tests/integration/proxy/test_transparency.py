"""What a client sees of an upstream that is asked for ids, or that does not do as it should."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.values.tokens import unpack_ids
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, proxy_with, running, settings_for
from tests.integration.faults.test_faults import (
    APIS,
    CHAT,
    EVENTS,
    JSON,
    LAST,
    chunked,
    parts,
    port_of,
    sized,
)
from tests.support.servers.listening import listening
from tests.support.servers.raw_upstream import (
    RawUpstream,
    Script,
    post,
    raw_ask,
    raw_upstream,
    says,
)

MESSAGES = "/v1/messages"


@pytest.fixture
async def vllm() -> AsyncIterator[RawUpstream]:
    async with raw_upstream("vllm") as server:
        yield server


@pytest.fixture
async def proxy(
    database_url: str, engine: AsyncEngine, vllm: RawUpstream, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy before a server that gives ids."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    settings = settings_for(database_url, vllm.url, tmp_path)
    async with proxy_with(settings, engine) as found:
        yield found


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


def coded(pieces: tuple[bytes, ...], wbits: int) -> list[bytes]:
    """Each piece can be read as soon as it is there."""
    engine = zlib.compressobj(wbits=wbits)
    sent = [engine.compress(piece) + engine.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]
    return [*sent, engine.flush()]


@pytest.mark.parametrize(
    ("coding", "wbits"), [(b"gzip", 31), (b"X-Gzip", 31), (b"deflate", 15), (b"deflate", -15)]
)
async def test_a_coded_stream_is_decoded_piece_by_piece(
    proxy: Proxy, vllm: RawUpstream, coding: bytes, wbits: int
) -> None:
    """Identity was asked for; a server or balancer that compresses all the same shows no ids."""
    goes_on = asyncio.Event()
    pieces = [chunked(piece) for piece in coded(STREAM, wbits)]

    async def script(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        await server.say(writer, CODED % coding + pieces[0])
        await goes_on.wait()
        await server.say(writer, b"".join(pieces[1:]) + LAST)
        writer.close()

    vllm.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy))
    writer.write(post(CHAT, STREAMED, b"Accept-Encoding: gzip"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"content-encoding" not in head.lower()
    await asyncio.wait_for(reader.readuntil(b'"content":"a"'), 5)
    goes_on.set()
    rest = await reader.read()
    writer.close()
    assert b"7770" not in rest
    assert rest.endswith(LAST)
    call = await proxy.only_call()
    assert (call.status, call.trainable) == ("complete", True)
    assert unpack_ids(call.tokens.sampled_ids) == [77701, 77702]
    assert b"\naccept-encoding: identity" in vllm.heads[-1].lower()


async def test_coded_streams_say_the_same_bytes_as_plain_ones(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    for sent in (
        EVENTS + chunked(*STREAM) + LAST,
        CODED % b"gzip" + chunked(gzip.compress(b"".join(STREAM))) + LAST,
        # Members one after another are one file.
        CODED % b"gzip" + chunked(*map(gzip.compress, STREAM)) + LAST,
    ):
        vllm.script = says(sent)
        assert parts(await raw_ask(port_of(proxy), post(CHAT, STREAMED)))[2] == SEEN


async def test_a_coded_whole_reply_shows_no_ids(proxy: Proxy, vllm: RawUpstream) -> None:
    sent = sized(b"200 OK", gzip.compress(WHOLE), JSON, b"Content-Encoding: gzip")
    vllm.script = says(sent)
    _, lines, body = parts(await raw_ask(port_of(proxy), post(CHAT, APIS[CHAT])))
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
async def test_what_cannot_be_decoded_does_not_reach_the_client(
    proxy: Proxy, vllm: RawUpstream, sent: bytes
) -> None:
    vllm.script = says(sent)
    reply = await raw_ask(port_of(proxy), post(CHAT, APIS[CHAT]))
    assert b"7770" not in reply
    if sent.startswith(CODED[:40]):
        assert b"content coding" in reply
        assert not reply.endswith(LAST)
    else:
        assert reply.startswith(b"HTTP/1.1 502 ")
        assert b"x-pawl-fault: upstream" in reply
    assert not (await proxy.only_call()).trainable


async def test_an_error_in_an_unknown_coding_is_the_upstreams_own(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    vllm.script = says(sized(b"503 Busy", b"\x0b\x02", b"Content-Encoding: br"))
    status, lines, body = parts(await raw_ask(port_of(proxy), post(CHAT, APIS[CHAT])))
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


def lingers(said: bytes, until: asyncio.Event, then: bytes) -> Script:
    async def script(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        await server.say(writer, EVENTS + said)
        await until.wait()
        await server.say(writer, then)
        writer.close()

    return script


@pytest.mark.parametrize("path", APIS)
async def test_a_streams_end_does_not_wait_for_the_upstreams_close(
    proxy: Proxy, vllm: RawUpstream, path: str
) -> None:
    """It leaves when the record is durable; what follows goes on as it comes."""
    vllm.owned_by = "somebody"
    goes_on = asyncio.Event()
    after = b": goodbye\n\ndata: more"
    vllm.script = lingers(chunked(ENDS[path]), goes_on, chunked(after) + LAST)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy))
    writer.write(post(path, APIS[path][:-1] + b',"stream":true}'))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(ENDS[path]), 5)
    call = await proxy.only_call()
    assert call.status == "complete"
    goes_on.set()
    rest = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert b": goodbye" in rest
    assert rest.endswith(LAST)


async def test_a_messages_end_made_of_a_chats_does_not_wait_either(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    goes_on = asyncio.Event()
    vllm.script = lingers(chunked(*STREAM), goes_on, chunked(b": goodbye\n\n") + LAST)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy))
    writer.write(post(MESSAGES, APIS[MESSAGES][:-1] + b',"stream":true}'))
    await asyncio.wait_for(reader.readuntil(b'{"type":"message_stop"}\n\n'), 5)
    goes_on.set()
    assert (await reader.read()).endswith(LAST)
    writer.close()
    assert (await proxy.only_call()).trainable


async def test_after_an_end_ids_are_hidden_all_the_same(proxy: Proxy, vllm: RawUpstream) -> None:
    goes_on = asyncio.Event()
    vllm.script = lingers(chunked(*STREAM), goes_on, chunked(chunk("c", 77703)) + LAST)
    asking = asyncio.create_task(raw_ask(port_of(proxy), post(CHAT, STREAMED)))
    await proxy.only_call()
    goes_on.set()
    reply = await asking
    assert b'"content":"c"' in reply
    assert b"7770" not in reply


async def test_the_upstreams_connection_is_used_again_after_it_lingered(
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


async def test_a_forwarded_streams_head_does_not_wait_for_its_first_event(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    goes_on = asyncio.Event()
    vllm.script = lingers(b"", goes_on, chunked(b"data: x\n\n") + LAST)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy))
    writer.write(post("/v1/embeddings", b"{}"))
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    goes_on.set()
    assert (await reader.read()).endswith(LAST)
    writer.close()


async def test_a_model_is_deleted_only_where_a_setting_says_so(
    database_url: str, engine: AsyncEngine, vllm: RawUpstream, tmp_path: Path
) -> None:
    request = post("/v1/models/m", b"").replace(b"POST", b"DELETE", 1)
    vllm.script = says(sized(b"200 OK", b'{"deleted":true}', JSON))
    for allowed in (False, True):
        settings = settings_for(database_url, vllm.url, tmp_path)
        settings = settings.model_copy(update={"allow_model_delete": allowed})
        async with running(settings):
            reply = await raw_ask(int(settings.listen.rpartition(":")[2]), request)
        if allowed:
            assert reply.startswith(b"HTTP/1.1 200 OK")
        else:
            assert reply.startswith(b"HTTP/1.1 403 ")
            assert b"x-pawl-fault: client" in reply
            error = json.loads(parts(reply)[2])["error"]
            assert "PAWL_ALLOW_MODEL_DELETE" in error["message"]
            assert error["code"] == "model_delete_not_allowed"
        assert len(vllm.heads) == int(allowed)
