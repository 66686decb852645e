"""The server's side of HTTP/1.1: the same exchange however it is cut, and no second meaning."""

import asyncio
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.http import server as module
from proxy.http.exchange import HIGH_WATER, SMALL_PIECE_BYTES, BodyStream, Exchange
from proxy.http.parsing import MAX_HEAD_BYTES
from tests.support.http_wires import Seen, Wire, client, cuts, feed, settle

HEAD = b"POST /v1/x?y=%2F HTTP/1.1\r\nHost: a\r\nX-Case: Kept\r\nx-case: again\r\n"
SIZED = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;ext=1\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nX-Echo: 1\r\nContent-Length: 5\r\n\r\nhello"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HEAD_REQUEST = GET.replace(b"GET", b"HEAD")


async def whole(exchange: Exchange) -> None:
    exchange.reply(200, b"OK", [(b"X", b"y")], b"hello")


async def sized(exchange: Exchange) -> None:
    exchange.begin_sized(200, b"OK", [], b"5")
    exchange.write(b"hel")
    exchange.end(b"lo")


async def chunks(exchange: Exchange) -> None:
    exchange.begin(200, b"OK", [])
    exchange.write(b"hel")
    exchange.end(b"lo")


async def _exchanged(pieces: list[bytes]) -> tuple[Seen, bytes, bool]:
    seen = Seen()
    connection, wire = client(seen)
    await feed(connection, pieces)
    return seen, wire.sent, wire.is_closing() or wire.ended


@given(st.sampled_from([SIZED, CHUNKED]).flatmap(cuts))
def test_request_is_read_and_answered_the_same_however_its_bytes_are_cut(
    pieces: list[bytes],
) -> None:
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
async def test_broken_request_body_is_refused_in_the_error_format_of_its_own_path(
    offer: bytes,
) -> None:
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
        (GET, True),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        # We do not say so in the reply, so that its client waits for the close.
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
async def test_connection_is_kept_open_or_closed_as_the_request_asks(
    head: bytes, kept: bool
) -> None:
    _, sent, closing = await _exchanged([head])
    assert closing is not kept
    assert (b"Connection: close" in sent) is not kept


async def test_a_reply_in_pieces_is_chunked_and_for_http_1_0_ends_with_the_connection() -> None:
    connection, wire = client(chunks)
    await feed(connection, [GET])
    assert wire.sent == (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    )
    connection, wire = client(chunks)
    await feed(connection, [b"GET / HTTP/1.0\r\n\r\n"])
    assert wire.sent == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
    assert wire.closed


@pytest.mark.parametrize("status", [204, 304])
async def test_reply_with_a_status_without_body_has_no_length_header(status: int) -> None:
    async def whole(exchange: Exchange) -> None:
        exchange.reply(status, b"", [], b"")

    async def pieces(exchange: Exchange) -> None:
        exchange.begin(status, b"", [])
        exchange.end()

    for handle in (whole, pieces):
        connection, wire = client(handle)
        await feed(connection, [GET])
        assert b"ength" not in wire.sent
        assert b"chunked" not in wire.sent
        assert wire.sent.endswith(b"\r\n\r\n")
        assert not wire.is_closing()


async def test_client_that_expects_100_continue_is_told_to_send_its_body() -> None:
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
    # Another server may read these as another length.
    POST + b"Content-Length: 9223372036854775808\r\n\r\n",
    POST + b"Content-Length: 18446744073709551615\r\n\r\n",
    POST + b"Content-Length: 0000000000000000000\r\n\r\n",
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
async def test_ambiguous_request_is_refused_and_nothing_after_it_is_read(
    request_bytes: bytes,
) -> None:
    seen, sent, closing = await _exchanged([request_bytes, SMUGGLED])
    assert sent.startswith(b"HTTP/1.1 400 ")
    assert sent.count(b"HTTP/1.1") == 1
    assert closing
    assert seen.requests == []


@given(st.sampled_from(AMBIGUOUS).flatmap(lambda bad: cuts(bad + SMUGGLED)))
def test_ambiguous_request_is_refused_however_it_is_cut(pieces: list[bytes]) -> None:
    seen, sent, closing = asyncio.run(_exchanged(pieces))
    assert seen.requests == []
    assert sent.count(b"HTTP/1.1") == 1
    assert closing


async def test_request_before_a_broken_request_is_answered() -> None:
    seen, sent, closing = await _exchanged([SIZED + b"\x00\x00" + SMUGGLED])
    assert sent.replace(b"Connection: close\r\n", b"") == ANSWER
    assert len(seen.requests) == 1
    assert closing


async def test_reply_that_has_begun_is_torn_if_the_request_body_breaks() -> None:
    async def early(exchange: Exchange) -> None:
        exchange.begin(200, b"OK", [])
        exchange.write(b"ab")
        await exchange.body.wait_for_more()
        exchange.end()

    connection, wire = client(early)
    await feed(connection, [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"not a size\r\n"])
    assert wire.aborted
    assert not wire.sent.endswith(b"0\r\n\r\n")


async def test_trailers_of_a_request_do_not_become_its_headers() -> None:
    trailed = CHUNKED[:-2] + b"X-Pawl-Episode: other\r\n\r\n"
    seen, _, _ = await _exchanged([trailed])
    assert b"X-Pawl-Episode" not in dict(seen.requests[0][2])


CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = CHUNKS + b"2\r\nhi\r\n0\r\n"
ENDLESS = {
    "a head": (HEAD, b"X: " + b"y" * 60_000 + b"\r\n"),
    "many trailers": (LAST, b"a: b\r\n" * 10_000),
    "a long trailer": (LAST + b"a: ", b"b" * 60_000),
    "a chunk extension": (CHUNKS + b"2;x=", b"y" * 60_000),
}


@pytest.mark.parametrize("part", ENDLESS)
async def test_request_with_an_endless_part_is_refused_with_431(part: str) -> None:
    begin, more = ENDLESS[part]
    seen, sent, closing = await _exchanged([begin, *[more] * (MAX_HEAD_BYTES // 60_000 + 1)])
    assert sent.startswith(b"HTTP/1.1 431 ")
    assert closing
    assert seen.requests == []


async def test_reading_from_the_client_is_paused_while_its_body_is_unread() -> None:
    taken: list[bytes] = []
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        while data := await exchange.body.wait_for_more():
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


@pytest.mark.parametrize("handle", [whole, sized, chunks])
async def test_head_request_gets_the_headers_of_get_and_no_body(handle: object) -> None:
    said: dict[bytes, bytes] = {}
    for request in (GET, HEAD_REQUEST):
        connection, wire = client(handle)  # type: ignore[arg-type]
        await feed(connection, [request, request])
        assert not wire.is_closing()
        said[request] = wire.sent
    head = said[GET][: said[GET].index(b"\r\n\r\n") + 4]
    assert said[HEAD_REQUEST] == head * 2


async def test_refused_head_request_gets_no_body() -> None:
    for request in (b"HEAD / HTTP/1.1\r\n\r\n", b"HEAD / HTTP/2.0\r\nHost: a\r\n\r\n"):
        connection, wire = client(Seen(), explain=lambda *_: b"why")
        await feed(connection, [request])
        assert wire.sent.endswith(b"\r\n\r\n")
        assert b"Content-Length: 3\r\n" in wire.sent


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nX: y\r\nHOST: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: user@a\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET /\r\n\r\n", b"400"),
        (b"GET / HTTP/0.9\r\n\r\n", b"400"),
        (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", b"505"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: my_host.example:8100\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: [::1]:8100\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"200"),
    ],
)
async def test_request_needs_a_single_valid_host_header_and_http_version_1(
    request_bytes: bytes, status: bytes
) -> None:
    connection, wire = client(seen := Seen())
    await feed(connection, [request_bytes + GET])
    assert wire.sent.startswith(b"HTTP/1.1 %b " % status)
    if status != b"200":
        assert seen.requests == []
        assert wire.sent.count(b"HTTP/1.1") == 1
        assert b"x-pawl-fault: client" in wire.sent


async def test_body_of_a_refusal_is_made_by_the_explain_callback() -> None:
    asked: list[tuple[str, int, str]] = []

    def explain(target: str, status: int, why: str) -> bytes:
        asked.append((target, status, why))
        return b"because"

    connection, wire = client(Seen(), explain=explain)
    await feed(connection, [b"GET /v1/messages HTTP/1.1\r\n\r\n"])
    [(target, status, why)] = asked
    assert (target, status) == ("/v1/messages", 400)
    assert "no Host header" in why
    assert wire.sent.endswith(b"\r\n\r\nbecause")


def inflow() -> BodyStream:
    return BodyStream(Wire(), asyncio.get_running_loop())


async def test_small_chunks_take_memory_in_proportion_to_their_bytes() -> None:
    body, chunks = inflow(), 100_000
    for number in range(chunks):
        body.put(b"%02d" % (number % 100))
    cost = sys.getsizeof(body._pieces) + sum(map(sys.getsizeof, body._pieces))
    assert cost < 2 * 2 * chunks
    body.end()
    assert await body.read_all() == b"".join(b"%02d" % n for n in range(100)) * (chunks // 100)


async def test_request_body_is_read_in_parts_at_a_cost_linear_in_its_size() -> None:
    size, turn, copied = 16 * 2**20, 2**14, 0
    body, piece = inflow(), b"x" * 2**18
    reading = asyncio.create_task(body.read_all(size - 1))
    await asyncio.sleep(0)
    for _ in range(size // len(piece)):
        body.put(piece)
    assert await reading is None
    tracemalloc.start()
    try:
        while body.has_untaken_bytes:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            assert len(body.take(turn)) == turn
            copied += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # All that is taken, and the rest as often as its memory is halved.
    assert copied <= 3 * size


@given(st.lists(st.binary(min_size=1, max_size=2 * SMALL_PIECE_BYTES), max_size=20), st.data())
def test_request_body_read_in_any_parts_has_the_received_bytes(
    pieces: list[bytes], data: st.DataObject
) -> None:
    async def through() -> None:
        body, taken = inflow(), b""
        for piece in pieces:
            body.put(piece)
            if data.draw(st.booleans()):
                most = data.draw(st.none() | st.integers(1, 3 * SMALL_PIECE_BYTES))
                waiting = body._size
                part = body.take(most)
                assert type(part) is bytes
                assert len(part) == min(waiting, most or waiting)
                taken += part
        while part := body.take(data.draw(st.integers(1, 3 * SMALL_PIECE_BYTES))):
            taken += part
        assert taken == b"".join(pieces)

    asyncio.run(through())


class Unforeseen(Exception):
    """What no handler expects."""


async def failing(_: Exchange) -> None:
    raise Unforeseen


async def failing_in_a_reply(exchange: Exchange) -> None:
    exchange.begin(200, b"OK", [])
    raise Unforeseen


async def forgetting(_: Exchange) -> None:
    """Answers nothing."""


async def cancelled(_: Exchange) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("handle", [failing, forgetting, cancelled])
async def test_failing_handler_is_answered_with_500_and_the_connection_closed(
    handle: object,
) -> None:
    connection, wire = client(handle)  # type: ignore[arg-type]
    await feed(connection, [GET, GET])
    assert wire.sent.startswith(b"HTTP/1.1 500 ")
    assert b"x-pawl-fault: proxy" in wire.sent
    assert wire.sent.count(b"HTTP/1.1") == 1
    assert wire.is_closing()


async def test_a_handler_that_fails_within_a_reply_tears_it() -> None:
    connection, wire = client(failing_in_a_reply)
    await feed(connection, [GET])
    assert wire.aborted
    assert not wire.sent.endswith(b"0\r\n\r\n")


async def test_handler_that_fails_after_its_reply_does_not_affect_the_next_request() -> None:
    async def late(exchange: Exchange) -> None:
        exchange.reply(200, b"OK", [], b"")
        raise Unforeseen

    connection, wire = client(late)
    await feed(connection, [GET + GET])
    assert wire.sent.count(b"HTTP/1.1 200 ") == 2
    assert not wire.is_closing()


async def test_failure_while_received_bytes_are_handled_is_answered_with_500(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, wire = client(Seen())

    def broken(_: Exchange) -> None:
        raise Unforeseen

    monkeypatch.setattr(connection, "_begin", broken)
    connection.data_received(GET)
    await settle()
    assert wire.sent.startswith(b"HTTP/1.1 500 ")
    assert wire.ended


async def test_reply_before_the_end_of_the_request_body_has_connection_close() -> None:
    connection, wire = client(whole)
    connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab")
    await settle()
    assert b"\r\nConnection: close\r\n" in wire.sent
    # What has come whole leaves the connection open.
    connection, wire = client(whole)
    connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab")
    await settle()
    assert b"Connection: close" not in wire.sent


async def test_bad_request_after_an_offer_to_upgrade_closes_the_connection_and_logs_nothing() -> (
    None
):
    offer = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    connection, wire = client(whole)
    with capture_logs() as lines:
        connection.data_received(offer + b"GET / HTTP/1.1\r\n\r\n")
        await settle()
    assert lines == []
    assert wire.sent.count(b"HTTP/1.1 200 ") == 1
    assert wire.is_closing()
