"""Bytes on their way to a connection's parser: all of them, in order, never too many at once."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http import parsing
from proxy.http.exchange import Exchange
from proxy.http.parsing import LONG_BODY, MANY_PIECES, SLICE_BYTES, Feeding, SlowWork
from tests.support.http_wires import client, settle


class Source:
    """Counts how often it is paused more than it is resumed."""

    def __init__(self) -> None:
        self.pauses = 0

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        self.pauses -= 1


@given(st.lists(st.tuples(st.integers(0, 3 * SLICE_BYTES), st.booleans()), max_size=8))
def test_parser_gets_every_received_byte_once_and_in_order(
    arriving: list[tuple[int, bool]],
) -> None:
    async def run() -> None:
        seen, source, turns = bytearray(), Source(), SlowWork()

        def feed(data: bytes) -> None:
            seen.extend(data)
            assert len(data) <= SLICE_BYTES
            fed.pieces += MANY_PIECES + 1 if b"h" in data else 1

        fed = Feeding(feed, source, turns)
        sent = b""
        for size, hard in arriving:
            data = (b"h" if hard else b"e") * size
            sent += data
            fed.put(data)
        while fed.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert seen == sent
        assert source.pauses == 0

    asyncio.run(run())


async def test_long_parsing_waits_for_its_turn_and_other_tasks_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, rests = [0.0], []
    monkeypatch.setattr(parsing, "monotonic", lambda: clock[0])
    loop = asyncio.get_running_loop()

    def later(delay: float, call: Callable[[], None]) -> None:
        rests.append(delay)
        clock[0] += delay
        loop.call_soon(call)

    monkeypatch.setattr(loop, "call_later", later)
    turns, done = SlowWork(), []

    def work(name: str) -> None:
        done.append(name)
        loop.call_soon(done.append, "other work")
        clock[0] += 0.02

    for name in "abc":
        turns.queue_work(lambda name=name: work(name))  # type: ignore[misc]
    for _ in range(10):
        await asyncio.sleep(0)
    assert done == ["a", "other work", "b", "other work", "c", "other work"]
    # As long a rest as the work took.
    assert rests == pytest.approx([0.0, 0.02, 0.02])


async def test_pieces_of_two_long_bodies_are_fed_in_turns() -> None:
    """Each of two gets one piece of what it sends, and then the other its own."""
    turns, order = SlowWork(), []

    def body(name: str) -> Feeding:
        def feed(data: bytes) -> None:
            order.append(name)
            fed.body_bytes += len(data)

        fed = Feeding(feed, Source(), turns)
        return fed

    one, two = body("one"), body("two")
    for fed in (one, two):
        fed.put(bytes(LONG_BODY + 1))
        assert not fed.waiting
    assert len(order) == 2 * (LONG_BODY // SLICE_BYTES + 1)
    order.clear()
    for _ in range(3):
        for fed in (one, two):
            fed.put(bytes(10))
            assert fed.waiting
        while one.waiting or two.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert order == ["one", "two"] * 3


async def test_failed_parsing_does_not_keep_other_parsing_from_its_turn() -> None:
    turns, done = SlowWork(), []

    def fail() -> None:
        raise ValueError("broken")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    turns.queue_work(fail)
    turned = asyncio.Event()
    turns.queue_work(lambda: (done.append(1), turned.set()))  # type: ignore[func-returns-value]
    await asyncio.wait_for(turned.wait(), 5)
    assert done == [1]


async def test_a_request_in_tiny_chunks_is_read_whole_beside_another() -> None:
    bodies: list[bytes | None] = []
    both = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        bodies.append(await exchange.read(2**24))
        exchange.reply(200, b"OK", [], b"")
        if len(bodies) == 2:
            both.set()

    connection, wire = client(handle)
    body = bytes(range(256)) * 400
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"2\r\n%b\r\n" % body[at : at + 2] for at in range(0, len(body), 2))
    connection.data_received(head + chunks + b"0\r\n\r\n")
    assert wire.paused
    other, _ = client(handle)
    other.data_received(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
    await settle()
    # The other does not wait for the end of the first.
    assert bodies == [b"x"]
    await both.wait()
    assert bodies[1] == body
    assert not wire.paused


async def test_bytes_of_a_disconnected_client_are_parsed_no_further() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.read(2**24)

    connection, _ = client(handle)
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.data_received(head + b"2\r\nab\r\n" * 2**16)
    connection.connection_lost(None)
    received = connection._parser.receiving
    # Time to parse on, if it did.
    await asyncio.sleep(0.1)
    assert not connection._feeding.waiting
    assert received is connection._parser.receiving


async def test_unread_body_does_not_delay_the_next_request() -> None:
    async def handle(exchange: Exchange) -> None:
        await asyncio.sleep(0)
        exchange.reply(404, b"Not Found", [], b"")

    connection, wire = client(handle)
    size = 300_000
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size
    connection.data_received(head + b"x" * size)
    await settle()
    assert wire.sent.startswith(b"HTTP/1.1 404")
    assert not wire.paused
    connection.data_received(b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n")
    await settle()
    assert wire.sent.count(b"HTTP/1.1 404") == 2
