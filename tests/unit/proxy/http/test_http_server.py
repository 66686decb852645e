"""The server's side of HTTP/1.1: the same exchange however it is cut, and no second meaning."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http import server as module
from proxy.http.exchange import HIGH_WATER, Exchange
from proxy.http.parsing import MAX_HEAD_BYTES
from proxy.http.server import ClientDeadlines
from tests.support.http_wires import Seen, client, cuts, feed, refusing, settle, swept

HEAD = b"POST /v1/x?y=%2F HTTP/1.1\r\nHost: a\r\nX-Case: Kept\r\nx-case: again\r\n"
SIZED = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;ext=1\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nX-Echo: 1\r\nContent-Length: 5\r\n\r\nhello"


async def _exchanged(pieces: list[bytes]) -> tuple[Seen, bytes, bool]:
    seen = Seen()
    connection, wire = client(seen)
    await feed(connection, pieces)
    return seen, wire.sent, wire.is_closing() or wire.ended


@given(st.sampled_from([SIZED, CHUNKED]).flatmap(cuts))
def test_any_cut_of_a_request_is_the_same_exchange(pieces: list[bytes]) -> None:
    seen, sent, closing = asyncio.run(_exchanged(pieces))
    [(method, target, headers, body)] = seen.requests
    assert (method, target, body) == ("POST", "/v1/x?y=%2F", b"hello")
    assert headers[1:3] == [(b"X-Case", b"Kept"), (b"x-case", b"again")]
    assert sent == ANSWER
    assert not closing


@given(cuts(SIZED + CHUNKED + b"GET /z HTTP/1.1\r\nHost: a\r\n\r\n" + SIZED))
def test_pipelined_requests_are_answered_in_order_however_they_are_cut(pieces: list[bytes]) -> None:
    seen, sent, closing = asyncio.run(_exchanged(pieces))
    assert [body for *_, body in seen.requests] == [b"hello", b"hello", b"", b"hello"]
    assert sent.count(b"HTTP/1.1 200") == 4
    assert not closing


@given(
    st.sampled_from([b"Content-Length: 5\r\n\r\nhello", CHUNKED[len(HEAD) :]]).flatmap(
        lambda rest: cuts(HEAD + UPGRADE + rest + SIZED)
    )
)
def test_an_offer_to_upgrade_is_ignored_and_its_body_read(pieces: list[bytes]) -> None:
    seen, sent, _ = asyncio.run(_exchanged(pieces))
    assert [body for *_, body in seen.requests] == [b"hello", b"hello"]
    assert sent == ANSWER * 2


@pytest.mark.parametrize("offer", [b"", UPGRADE])
async def test_a_broken_body_is_refused_in_the_words_of_its_own_target(offer: bytes) -> None:
    explained: list[str] = []

    def explain(target: str, _status: int, why: str) -> bytes:
        explained.append(target)
        return why.encode()

    head = HEAD.replace(b"POST", b"HEAD") + offer + b"Transfer-Encoding: chunked\r\n\r\n"
    connection, wire = client(Seen(), explain=explain)
    await feed(connection, [head, b"not a length\r\n"])
    assert explained == ["/v1/x?y=%2F"]
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert wire.sent.endswith(b"\r\n\r\n"), "no reply to HEAD has a body"


@pytest.mark.parametrize("at_once", [False, True])
async def test_many_pipelined_requests_wait_in_the_socket(at_once: bool) -> None:
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        exchange.reply(200, b"OK", [], b"")

    connection, wire = client(slow)
    requests = [SIZED] * (3 * module.MAX_PIPELINED)
    await feed(connection, [b"".join(requests)] if at_once else requests)
    assert wire.paused
    go_on.set()
    for _ in requests:
        await settle()
    assert not wire.paused
    assert wire.sent.count(b"HTTP/1.1 200") == len(requests)


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        # We do not say so in the reply, so that its client waits for the close.
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
async def test_a_connection_is_kept_or_closed_as_was_asked(head: bytes, kept: bool) -> None:
    _, sent, closing = await _exchanged([head])
    assert closing is not kept
    assert (b"Connection: close" in sent) is not kept


async def _in_pieces(exchange: Exchange) -> None:
    await exchange.read(100)
    exchange.begin(200, b"OK", [])
    exchange.write(b"ab")
    exchange.end(b"c")


async def test_a_reply_in_pieces_is_chunked_and_for_http_1_0_ends_with_the_connection() -> None:
    connection, wire = client(_in_pieces)
    await feed(connection, [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
    assert wire.sent == (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    )
    connection, wire = client(_in_pieces)
    await feed(connection, [b"GET / HTTP/1.0\r\n\r\n"])
    assert wire.sent == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"
    assert wire.closed


@pytest.mark.parametrize("status", [204, 304])
async def test_a_reply_that_has_no_body_says_no_length(status: int) -> None:
    async def whole(exchange: Exchange) -> None:
        exchange.reply(status, b"", [], b"")

    async def pieces(exchange: Exchange) -> None:
        exchange.begin(status, b"", [])
        exchange.end()

    for handle in (whole, pieces):
        connection, wire = client(handle)
        await feed(connection, [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
        assert b"ength" not in wire.sent
        assert b"chunked" not in wire.sent
        assert wire.sent.endswith(b"\r\n\r\n")
        assert not wire.is_closing()


async def test_a_client_that_waits_for_it_is_told_to_send_its_body() -> None:
    connection, wire = client(seen := Seen())
    await feed(connection, [HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"])
    assert wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    await feed(connection, [b"hello"])
    assert wire.sent.endswith(ANSWER)
    assert seen.requests[0][3] == b"hello"


async def test_a_body_that_is_too_long_is_answered_before_the_connection_is_closed() -> None:
    async def refuse(exchange: Exchange) -> None:
        assert await exchange.read(10) is None
        exchange.reply(413, b"", [], b"")

    connection, wire = client(refuse)
    await feed(connection, [HEAD + b"Content-Length: 100\r\n\r\n", b"x" * 50])
    assert wire.sent.startswith(b"HTTP/1.1 413")
    # Not closed yet, which would be a reset: what still comes is read and thrown away.
    assert (wire.ended, wire.is_closing()) == (True, False)
    await feed(connection, [b"x" * 50, SIZED])
    assert wire.sent.count(b"HTTP/1.1") == 1


SMUGGLED = b"GET /v1/load_lora_adapter HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
# Two readings of one request: whoever reads it otherwise than the upstream lets a second in.
AMBIGUOUS = [
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    POST + b"Content-Length: 5, 5\r\n\r\nhello",
    POST + b"Content-Length: +5\r\n\r\nhello",
    POST + b"Content-Length: 0x5\r\n\r\nhello",
    POST + b"Content-Length : 5\r\n\r\nhello",
    POST + b"Content-Length:\r\n\r\n",
    POST + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    POST + b"X: a\r\n folded\r\nContent-Length: 5\r\n\r\nhello",
    POST + b"X: a\nContent-Length: 5\r\n\r\nhello",
    POST + b"X: a\rb\r\nContent-Length: 5\r\n\r\nhello",
    POST + b"X: a\x00b\r\nContent-Length: 5\r\n\r\nhello",
    POST + b"X\x00: a\r\nContent-Length: 5\r\n\r\nhello",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nhello",
    b"GET / HTTP/1.1\n\n",
    b"GET /a b HTTP/1.1\r\n\r\n",
    b"GET /\x01 HTTP/1.1\r\n\r\n",
    b"get / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.2\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


@pytest.mark.parametrize("request_bytes", AMBIGUOUS)
async def test_what_can_be_read_in_two_ways_is_refused_and_nothing_after_it_is_read(
    request_bytes: bytes,
) -> None:
    seen, sent, closing = await _exchanged([request_bytes, SMUGGLED])
    assert sent.startswith(b"HTTP/1.1 400 ")
    assert sent.count(b"HTTP/1.1") == 1
    assert closing
    assert seen.requests == []


@given(st.sampled_from(AMBIGUOUS).flatmap(lambda bad: cuts(bad + SMUGGLED)))
def test_and_so_however_it_is_cut(pieces: list[bytes]) -> None:
    seen, sent, closing = asyncio.run(_exchanged(pieces))
    assert seen.requests == []
    assert sent.count(b"HTTP/1.1") == 1
    assert closing


async def test_a_request_before_a_broken_one_is_answered_first() -> None:
    seen, sent, closing = await _exchanged([SIZED + b"\x00\x00" + SMUGGLED])
    assert sent.replace(b"Connection: close\r\n", b"") == ANSWER
    assert len(seen.requests) == 1
    assert closing


async def test_a_reply_that_has_begun_when_the_request_breaks_is_torn() -> None:
    async def early(exchange: Exchange) -> None:
        exchange.begin(200, b"OK", [])
        exchange.write(b"ab")
        await exchange.body.more()
        exchange.end()

    connection, wire = client(early)
    await feed(connection, [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"not a size\r\n"])
    assert wire.aborted
    assert not wire.sent.endswith(b"0\r\n\r\n")


async def test_trailers_are_no_headers() -> None:
    trailed = CHUNKED[:-2] + b"X-Pawl-Episode: other\r\n\r\n"
    seen, _, _ = await _exchanged([trailed])
    assert b"X-Pawl-Episode" not in dict(seen.requests[0][2])


async def test_a_head_without_end_is_refused() -> None:
    piece = b"X: " + b"y" * 65_000 + b"\r\n"
    seen, sent, closing = await _exchanged([HEAD, *[piece] * (MAX_HEAD_BYTES // 65_000 + 1)])
    assert sent.startswith(b"HTTP/1.1 431 ")
    assert closing
    assert seen.requests == []


async def test_a_client_that_sends_faster_than_is_read_is_told_to_wait() -> None:
    taken: list[bytes] = []
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        while data := await exchange.body.more():
            taken.append(data)
        exchange.reply(200, b"OK", [], b"")

    connection, wire = client(slow)
    size = HIGH_WATER + 1
    await feed(connection, [HEAD + b"Content-Length: %d\r\n\r\n" % size, b"x" * size])
    assert wire.paused
    go_on.set()
    await settle()
    assert not wire.paused
    assert sum(map(len, taken)) == size


async def test_a_client_that_leaves_stops_who_works_for_it() -> None:
    stopped = asyncio.Event()

    async def forever(_: Exchange) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()

    connection, _ = client(forever)
    await feed(connection, [SIZED])
    connection.connection_lost(None)
    await settle()
    assert stopped.is_set()


async def test_who_says_nothing_is_swept_away() -> None:
    """An idle connection is closed; a request whose rest does not come is refused."""
    connection, wire = client(Seen())
    await feed(connection, [SIZED])
    before = asyncio.get_running_loop().time()
    connection.sweep(before, ClientDeadlines(idle_s=1.0))
    assert not wire.is_closing()
    connection.sweep(before + 2, ClientDeadlines(idle_s=1.0))
    assert wire.closed
    connection, wire = client(refusing)
    await feed(connection, [SIZED[:-1]])
    await swept(connection, 2, body_s=1.0)
    assert wire.sent.startswith(b"HTTP/1.1 408 ")
