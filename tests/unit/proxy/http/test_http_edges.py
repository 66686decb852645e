"""What stands at HTTP's edges: HEAD, Host, versions, trailers, small chunks, handlers that fail."""

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.http.exchange import SMALL, BodyStream, Exchange
from proxy.http.parsing import MAX_HEAD_BYTES
from tests.support.http_wires import Seen, Wire, client, cuts, feed, settle

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HEAD = GET.replace(b"GET", b"HEAD")
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


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


@pytest.mark.parametrize("handle", [whole, sized, chunks])
async def test_head_is_answered_with_the_head_of_get_and_no_body(handle: object) -> None:
    said: dict[bytes, bytes] = {}
    for request in (GET, HEAD):
        connection, wire = client(handle)  # type: ignore[arg-type]
        await feed(connection, [request, request])
        assert not wire.is_closing()
        said[request] = wire.sent
    head = said[GET][: said[GET].index(b"\r\n\r\n") + 4]
    assert said[HEAD] == head * 2


async def test_a_refused_head_has_no_body_either() -> None:
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
async def test_one_host_and_a_version_that_is_served(request_bytes: bytes, status: bytes) -> None:
    connection, wire = client(seen := Seen())
    await feed(connection, [request_bytes + GET])
    assert wire.sent.startswith(b"HTTP/1.1 %b " % status)
    if status != b"200":
        assert seen.requests == []
        assert wire.sent.count(b"HTTP/1.1") == 1
        assert b"x-pawl-fault: client" in wire.sent


async def test_a_refusal_says_why_in_the_words_it_is_given() -> None:
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


TRAILERS = {
    "many": b"a: b\r\n" * (1 + MAX_HEAD_BYTES // 6),
    "long": b"a: " + b"b" * MAX_HEAD_BYTES,
}


@pytest.mark.parametrize("kind", TRAILERS)
async def test_trailers_are_limited_with_the_head(kind: str) -> None:
    connection, wire = client(seen := Seen())
    trailers = TRAILERS[kind] * 4
    pieces = [trailers[at : at + 60_000] for at in range(0, len(trailers), 60_000)]
    await feed(connection, [CHUNKED + b"2\r\nhi\r\n0\r\n", *pieces, b"\r\n"])
    assert wire.sent.startswith(b"HTTP/1.1 431 ")
    assert seen.requests == []


async def test_a_chunk_extension_without_end_is_refused() -> None:
    connection, wire = client(seen := Seen())
    await feed(connection, [CHUNKED + b"2;x=", *[b"y" * 60_000] * 5])
    assert wire.sent.startswith(b"HTTP/1.1 431 ")
    assert seen.requests == []


async def test_trailers_cost_no_memory_while_they_are_few_enough() -> None:
    connection, _ = client(seen := Seen())
    trailers = b"a: b\r\n" * (MAX_HEAD_BYTES // 12)
    await feed(connection, [CHUNKED + b"2\r\nhi\r\n0\r\n" + trailers])
    assert connection._parser._headers == []
    await feed(connection, [b"\r\n"])
    assert seen.requests[0][3] == b"hi"


def inflow() -> BodyStream:
    return BodyStream(Wire(), asyncio.get_running_loop())


async def test_small_chunks_cost_about_what_they_hold() -> None:
    body, chunks = inflow(), 100_000
    for number in range(chunks):
        body.put(b"%02d" % (number % 100))
    cost = sys.getsizeof(body._pieces) + sum(map(sys.getsizeof, body._pieces))
    assert cost < 2 * 2 * chunks
    body.end()
    assert await body.whole() == b"".join(b"%02d" % n for n in range(100)) * (chunks // 100)


@given(st.lists(st.binary(min_size=1, max_size=2 * SMALL), max_size=20), st.data())
def test_joined_pieces_are_the_same_bytes(pieces: list[bytes], data: st.DataObject) -> None:
    async def through() -> None:
        body, taken = inflow(), b""
        for piece in pieces:
            body.put(piece)
            if data.draw(st.booleans()):
                part = body.take()
                assert type(part) is bytes
                taken += part
        assert taken + body.take() == b"".join(pieces)

    asyncio.run(through())


async def test_a_piece_that_comes_alone_is_not_copied() -> None:
    body, piece = inflow(), b"x" * 10
    body.put(piece)
    assert body.take() is piece


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
async def test_a_handler_that_fails_is_answered_for_and_the_connection_closed(
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


async def test_a_handler_that_fails_after_its_reply_costs_the_next_request_nothing() -> None:
    async def late(exchange: Exchange) -> None:
        exchange.reply(200, b"OK", [], b"")
        raise Unforeseen

    connection, wire = client(late)
    await feed(connection, [GET + GET])
    assert wire.sent.count(b"HTTP/1.1 200 ") == 2
    assert not wire.is_closing()


async def test_a_callback_that_fails_is_answered_with_500(
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


@given(cuts(HEAD + GET + HEAD))
def test_head_and_get_are_told_apart_however_they_are_cut(pieces: list[bytes]) -> None:
    async def asked() -> bytes:
        connection, wire = client(whole)
        await feed(connection, pieces)
        return wire.sent

    sent = asyncio.run(asked())
    assert sent.count(b"Content-Length: 5") == 3
    assert sent.count(b"hello") == 1


async def test_a_reply_before_the_body_has_come_says_that_the_connection_closes() -> None:
    connection, wire = client(whole)
    connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab")
    await settle()
    assert b"\r\nConnection: close\r\n" in wire.sent
    # What has come whole leaves the connection open.
    connection, wire = client(whole)
    connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab")
    await settle()
    assert b"Connection: close" not in wire.sent


async def test_a_bad_request_after_an_offer_to_upgrade_is_no_failure_of_the_proxys() -> None:
    offer = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    connection, wire = client(whole)
    with capture_logs() as lines:
        connection.data_received(offer + b"GET / HTTP/1.1\r\n\r\n")
        await settle()
    assert lines == []
    assert wire.sent.count(b"HTTP/1.1 200 ") == 1
    assert wire.is_closing()


@pytest.mark.parametrize("length", [b"9223372036854775808", b"18446744073709551615", b"0" * 19])
async def test_a_length_that_another_server_may_read_as_another_one_is_refused(
    length: bytes,
) -> None:
    connection, wire = client(whole)
    await feed(connection, [GET[:-2] + b"Content-Length: %b\r\n\r\n" % length])
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert wire.ended
