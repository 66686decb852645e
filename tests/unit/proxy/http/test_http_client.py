"""The client's side of HTTP/1.1: replies however they are cut, connections kept or dropped."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http import client as module
from proxy.http.client import NoReply, Reply, Silent, Torn
from proxy.http.exchange import HIGH_WATER
from tests.support.http_wires import Wire, cuts, feed, upstream

HEAD = b"HTTP/1.1 200 Fine\r\nX-Case: Kept\r\nx-case: again\r\n"
SIZED = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;e\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
TRAILED = CHUNKED[:-2] + b"X-After: body\r\n\r\n"
ANNOUNCED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED


async def _asked(pieces: list[bytes]) -> tuple[Reply, bytes, bool, Wire]:
    pool, connection, transport = upstream()
    answer = connection.ask(b"GET / HTTP/1.1\r\n\r\n")
    await feed(connection, pieces)
    reply = await answer
    body = await reply.read()
    return reply, body, len(pool._idle) == 1, transport


@given(st.sampled_from([SIZED, CHUNKED, TRAILED, ANNOUNCED]).flatmap(cuts))
def test_servers_reply_is_read_the_same_however_its_bytes_are_cut(pieces: list[bytes]) -> None:
    reply, body, kept, _ = asyncio.run(_asked(pieces))
    assert (reply.status, reply.reason, body) == (200, b"Fine", b"hello")
    assert reply.headers[:2] == [(b"X-Case", b"Kept"), (b"x-case", b"again")]
    assert reply.header(b"x-after") is None
    assert kept


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_reply_without_a_body_is_complete_after_its_head(status: bytes) -> None:
    _, body, kept, _ = await _asked([b"HTTP/1.1 " + status + b"\r\n\r\n"])
    assert body == b""
    assert kept


async def test_other_tasks_run_between_the_pieces_of_a_large_read() -> None:
    _, connection, _ = upstream()
    answer = connection.ask(b"")
    await feed(connection, [HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000])
    reply, turns, sizes = await answer, [], []
    async for piece in reply.pieces():
        asyncio.get_running_loop().call_soon(turns.append, len(sizes))
        sizes.append(len(piece))
    assert (sum(sizes), max(sizes)) == (100_000, module.TURN_BYTES)
    assert turns[: len(sizes) - 1] == list(range(len(sizes) - 1))


async def test_discarding_a_reply_spares_a_connection_already_reused() -> None:
    pool, connection, transport = upstream()
    answer = connection.ask(b"")
    await feed(connection, [SIZED])
    refusal = await answer
    # The whole reply has come, and the next request got its connection before it was discarded.
    assert pool.kept_connection() is connection
    following = connection.ask(b"")
    refusal.discard()
    assert not transport.is_closing()
    await feed(connection, [SIZED])
    assert await (await following).read() == b"hello"
    # One that nobody has taken is closed.
    (await following).discard()
    assert transport.is_closing()


@pytest.mark.parametrize(
    "reply",
    [
        b"\x15\x03\x01\x00\x02",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\nb: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
async def test_invalid_reply_aborts_the_connection(reply: bytes) -> None:
    pool, connection, transport = upstream()
    answer = connection.ask(b"")
    await feed(connection, [reply])
    assert transport.aborted
    with pytest.raises(NoReply):
        await answer
    assert not pool._idle


async def test_connection_that_the_server_closes_is_not_reused() -> None:
    closing = SIZED.replace(b"X-Case: Kept", b"Connection: close")
    _, body, kept, transport = await _asked([closing])
    assert body == b"hello"
    assert not kept
    assert transport.closed


@given(st.sampled_from([SIZED, b"HTTP/1.1 408 Request Timeout\r\n", b"junk"]).flatmap(cuts))
def test_unrequested_bytes_from_the_server_close_the_connection(pieces: list[bytes]) -> None:
    """It must not become the answer to the next request."""

    async def unasked() -> None:
        pool, connection, transport = upstream()
        answer = connection.ask(b"")
        await feed(connection, [SIZED + pieces[0], *pieces[1:]])
        assert await (await answer).read() == b"hello"
        assert transport.is_closing()
        assert not connection.usable
        assert pool.requests_under_way <= 0

    asyncio.run(unasked())


async def test_idle_connection_to_the_server_is_reused_only_within_its_keepalive_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, connection, transport = upstream()
    connection.ask(b"")
    await feed(connection, [SIZED])
    assert pool.kept_connection() is connection
    pool.keep_for_reuse(connection)
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.0)
    fresh = upstream()[1]

    async def connect() -> object:
        return fresh

    monkeypatch.setattr(pool, "connect", connect)
    assert (pool.kept_connection() or await pool.connect()) is fresh
    assert transport.closed


async def test_a_server_that_is_silent_for_too_long_is_given_up() -> None:
    pool, connection, transport = upstream()
    answer = connection.ask(b"")
    pool.sweep(silence_s=10.0)
    assert not transport.is_closing()
    pool.sweep(silence_s=-1.0)
    assert transport.aborted
    with pytest.raises(Silent):
        await answer


async def test_reading_from_the_server_is_paused_while_its_bytes_are_unread() -> None:
    _, connection, transport = upstream()
    answer = connection.ask(b"")
    size = HIGH_WATER + 1
    await feed(connection, [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size])
    reply = await answer
    assert transport.paused
    assert len(await reply.body.wait_for_more()) == size
    assert not transport.paused


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b""]
)
async def test_reply_to_head_has_no_body_despite_its_framing(framing: bytes) -> None:
    pool, connection, transport = upstream()
    answer = connection.ask(b"HEAD / HTTP/1.1\r\n\r\n", to_head=True)
    await feed(connection, [HEAD + framing + b"\r\n", b"hello"])
    reply = await answer
    assert await reply.read() == b""
    # It cannot be told from a body what follows: the connection is not used again.
    assert transport.is_closing()
    assert not pool._idle


@pytest.mark.parametrize(
    "endless",
    [
        [b"HTTP/1.1 200 OK\r\n", *[b"X: " + b"y" * 60_000 + b"\r\n"] * 5],
        [b"HTTP/1.1 200 ", *[b"y" * 60_000] * 5],
        [b"HTTP/1.1 103 Early Hints\r\nLink: " + b"y" * 60_000 + b"\r\n\r\n"] * 5,
    ],
)
async def test_endless_head_of_a_reply_aborts_the_connection(endless: list[bytes]) -> None:
    _, connection, transport = upstream()
    answer = connection.ask(b"")
    await feed(connection, endless)
    assert transport.aborted
    with pytest.raises(NoReply, match="more than"):
        await answer


@pytest.mark.parametrize("trailer", [b"a: b\r\n" * 10_000, b"a: " + b"b" * 60_000])
async def test_endless_trailers_of_a_reply_abort_the_connection(trailer: bytes) -> None:
    _, connection, transport = upstream()
    answer = connection.ask(b"")
    await feed(connection, [CHUNKED[:-2], trailer, *[trailer] * 5])
    reply = await answer
    with pytest.raises(Torn, match="more than"):
        await reply.read()
    assert transport.aborted
    assert connection._headers == []


async def test_limit_of_a_replys_head_does_not_apply_to_its_body() -> None:
    _, connection, transport = upstream()
    answer = connection.ask(b"")
    await feed(connection, [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"])
    reply, size = await answer, 0
    for _ in range(10):
        await feed(connection, [b"%x\r\n%b\r\n" % (60_000, b"x" * 60_000)])
        size += len(await reply.body.wait_for_more())
    assert (size, transport.is_closing()) == (600_000, False)
