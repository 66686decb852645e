"""A client that makes no progress is disconnected; a client that makes progress never is."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http.exchange import HIGH_WATER, Exchange
from proxy.http.server import (
    LONGEST_SWEEP_S,
    MAX_PIPELINED,
    PING_S,
    SHORTEST_SWEEP_S,
    STEP_BYTES,
    ClientDeadlines,
    Connection,
    OnLate,
)
from tests.support.http_wires import Seen, Wire, client, feed, refusing, settle, swept

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
LATER_S = 60.0


def noting(late: list[str]) -> OnLate:
    """Note what a client was too slow with."""
    return lambda what, _allowed_s, _exchange: late.append(what)


@given(st.builds(ClientDeadlines, *[st.floats(1e-3, 1e6)] * 4))
def test_deadlines_are_checked_as_often_as_the_shortest_deadline_needs_within_bounds(
    patience: ClientDeadlines,
) -> None:
    shortest = min(patience.head_s, patience.body_s, patience.write_s, patience.idle_s)
    assert SHORTEST_SWEEP_S <= patience.sweep_s <= LONGEST_SWEEP_S
    assert patience.sweep_s <= max(shortest / 10, SHORTEST_SWEEP_S)


async def streaming(exchange: Exchange) -> None:
    await exchange.read(100)
    exchange.begin(200, b"OK", [])
    while True:
        exchange.write(b"x" * STEP_BYTES)
        await exchange.wait_until_drained()
        await asyncio.sleep(0)


def stall(connection: Connection, wire: Wire) -> None:
    """The client takes nothing more."""
    wire.stalled = True
    wire.unsent = 1
    connection.pause_writing()


@pytest.mark.parametrize(
    ("what", "sent"), [("head", b"GET / HT"), ("body", HEAD % 1000), ("write", HEAD % 0)]
)
async def test_client_is_late_once_its_deadline_is_over_and_not_before(
    what: str, sent: bytes
) -> None:
    late: list[str] = []
    connection, wire = client(streaming if what == "write" else refusing, on_late=noting(late))
    await feed(connection, [sent])
    if what == "write":
        stall(connection, wire)
    await swept(connection, 0.9, **{f"{what}_s": 1.0})
    assert late == []
    await swept(connection, 2.0, **{f"{what}_s": 1.0})
    assert late == [what]


async def test_slow_upload_that_makes_progress_is_accepted_however_long_it_takes() -> None:
    connection, wire = client(refusing)
    await feed(connection, [HEAD % (100 * STEP_BYTES // 8)])
    now = asyncio.get_running_loop().time()
    for number in range(100):
        connection.sweep(now + number * LATER_S, ClientDeadlines(body_s=10 * LATER_S))
        await feed(connection, [b"x" * (STEP_BYTES // 8)])
    assert wire.sent.startswith(b"HTTP/1.1 200 ")


async def test_late_request_body_tears_a_reply_that_has_begun() -> None:
    async def early(exchange: Exchange) -> None:
        exchange.begin(200, b"OK", [])
        await exchange.body.wait_for_more()

    connection, wire = client(early)
    await feed(connection, [HEAD % 1000])
    await swept(connection, 2.0, body_s=1.0)
    assert wire.aborted


async def test_client_is_not_late_while_its_reading_is_paused() -> None:
    async def forever(_: Exchange) -> None:
        await asyncio.sleep(600)

    connection, wire = client(forever)
    await feed(connection, [HEAD % (2 * HIGH_WATER), b"x" * (HIGH_WATER + 1)])
    assert wire.paused
    await swept(connection, LATER_S, LATER_S, body_s=1.0)
    assert not wire.is_closing()
    connection.connection_lost(None)

    connection, wire = client(forever)
    await feed(connection, [HEAD % 0] * (MAX_PIPELINED + 1) + [HEAD[:9], HEAD[9:] % 9])
    assert wire.paused
    await swept(connection, LATER_S, LATER_S, body_s=1.0, head_s=1.0)
    assert wire.sent == b""
    connection.connection_lost(None)


async def test_client_that_waits_for_100_continue_is_not_late() -> None:
    async def forever(_: Exchange) -> None:
        await asyncio.sleep(600)

    connection, wire = client(forever)
    expects = HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    await feed(connection, [expects % 9])
    await swept(connection, LATER_S, LATER_S, body_s=1.0)
    assert not wire.is_closing()
    connection.connection_lost(None)


async def test_slow_reader_that_makes_progress_is_waited_for() -> None:
    connection, wire = client(streaming)
    await feed(connection, [HEAD % 0])
    now = asyncio.get_running_loop().time()
    stall(connection, wire)
    wire.unsent = 100 * STEP_BYTES
    for number in range(100):
        connection.sweep(now + number * LATER_S, ClientDeadlines(write_s=1.5 * LATER_S))
        wire.unsent -= STEP_BYTES
    await settle()
    assert not wire.is_closing()
    connection.connection_lost(None)


async def test_paused_reader_without_unsent_bytes_is_not_late() -> None:
    connection, wire = client(streaming)
    await feed(connection, [HEAD % 0])
    connection.pause_writing()
    await swept(connection, LATER_S, LATER_S, write_s=1.0)
    assert not wire.is_closing()
    connection.connection_lost(None)


async def test_idle_client_connection_is_closed_after_its_deadline() -> None:
    connection, wire = client(Seen())
    await feed(connection, [HEAD % 0])
    await swept(connection, 0.5, idle_s=1.0)
    assert not wire.is_closing()
    await swept(connection, 2.0, idle_s=1.0)
    assert wire.closed


OFFERED = [
    HEAD.replace(b"\r\n\r\n", b"\r\n" + UPGRADE + b"\r\n") % 5 + b"hello",
    b"GET /v1/x HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"\r\n",
]


@pytest.mark.parametrize("offer", OFFERED)
async def test_client_that_offered_an_upgrade_may_wait_for_a_long_reply(offer: bytes) -> None:
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.read(100)
        await go_on.wait()
        exchange.reply(200, b"OK", [], b"")

    late: list[str] = []
    connection, wire = client(slow, on_late=noting(late))
    await feed(connection, [HEAD % 0, offer])
    await swept(connection, LATER_S, LATER_S, head_s=1.0)
    go_on.set()
    await settle()
    assert wire.sent.count(b"HTTP/1.1 200") == 2
    assert not wire.is_closing()
    assert late == []


@pytest.mark.parametrize("offer", OFFERED)
async def test_client_that_offered_an_upgrade_may_idle(offer: bytes) -> None:
    late: list[str] = []
    connection, wire = client(Seen(), on_late=noting(late))
    await feed(connection, [offer])
    answered = wire.sent
    await swept(connection, LATER_S, LATER_S, head_s=1.0, idle_s=10 * LATER_S)
    assert wire.sent == answered
    assert not wire.is_closing()
    # Nor is it spared the deadline of the next head.
    await feed(connection, [b"GET / HT"])
    await swept(connection, LATER_S, LATER_S, head_s=1.0)
    assert late == ["head"]
    assert wire.sent.count(b"HTTP/1.1 408 ") == 1


@pytest.mark.parametrize(
    ("pieces", "pings"),
    [
        ([b""], 2),
        ([b"data: 1\n\n"], 2),
        ([b"data: 1\r\n\r\n"], 2),
        ([b"data: 1\n", b"\n"], 2),
        ([b"event: a\n"], 0),
        ([b"data: 1\n\n", b"data"], 0),
    ],
)
async def test_silent_stream_gets_pings_between_its_events_alone(
    pieces: list[bytes], pings: int
) -> None:
    ping = b"event: ping\n\n"

    async def stream(exchange: Exchange) -> None:
        exchange.begin(200, b"OK", [])
        exchange.ping = ping
        for piece in pieces:
            exchange.write(piece)
        await asyncio.Event().wait()

    connection, wire = client(stream)
    await feed(connection, [HEAD % 0])
    sent = wire.sent
    await swept(connection, PING_S - 1)
    assert wire.sent == sent
    # A look that sees the ping leave begins to count again.
    await swept(connection, PING_S + 1, 1.0, PING_S + 1)
    assert wire.sent == sent + pings * (b"%x\r\n%b\r\n" % (len(ping), ping))
    connection.connection_lost(None)


async def test_reply_of_an_api_without_pings_stays_silent() -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.begin(200, b"OK", [])
        await asyncio.Event().wait()

    connection, wire = client(stream)
    await feed(connection, [HEAD % 0])
    sent = wire.sent
    await swept(connection, 2 * PING_S, 2 * PING_S)
    assert wire.sent == sent
    connection.connection_lost(None)
