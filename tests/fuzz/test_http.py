"""Any bytes to both HTTP parsers, in any pieces: nothing is raised, nobody is left hanging."""

import asyncio
from contextlib import suppress

from hypothesis import given

from proxy.http.client import NoReply, Torn
from proxy.http.exchange import ClientGone, Exchange
from tests.fuzz import messages
from tests.fuzz.loops import run
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import Tape, made_of
from tests.fuzz.texts import cut
from tests.support.http_wires import Wire, client, settle, upstream

MOST_BODY = 2**16


class Echo:
    """Answers every request with its body; counts those that came whole."""

    def __init__(self) -> None:
        self.begun = 0
        self.answered = 0

    async def __call__(self, exchange: Exchange) -> None:
        """See `Handler`."""
        self.begun += 1
        try:
            body = await exchange.read(MOST_BODY)
        except ClientGone:
            return
        status = 413 if body is None else 200
        exchange.reply(status, b"", [], body or b"")
        self.answered += 1


@fuzzing(500)
@given(made_of(lambda tape: cut(tape, messages.requests(tape))))
def test_any_bytes_from_a_client_are_answered_refused_or_waited_for(pieces: list[bytes]) -> None:
    async def served() -> None:
        echo = Echo()
        connection, wire = client(echo)
        await _arrive(connection, wire, pieces)
        if not (wire.is_closing() or wire.ended):
            # All that came whole was answered: what is left is a request on its way.
            assert connection._current is connection._parser.receiving
        heads = wire.sent.count(b"HTTP/1.1 ") - wire.sent.count(b"HTTP/1.1 100 ")
        assert heads >= echo.answered
        # The client leaves: nothing of it is left.
        wire.abort()
        await settle()
        assert connection not in connection.server.connections
        assert connection.task is None or connection.task.done()

    run(served)


async def _arrive(connection: asyncio.Protocol, wire: Wire, pieces: list[bytes]) -> None:
    """Bring the pieces as a transport does: none to a connection that was closed."""
    for piece in pieces:
        if wire.is_closing():
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    await settle()


def _answer(tape: Tape) -> tuple[list[bytes], int, bool]:
    return cut(tape, messages.replies(tape)), tape.below(3), tape.rarely()


@fuzzing(500)
@given(made_of(_answer))
def test_any_bytes_from_an_upstream_end_in_a_reply_or_an_error(
    answer: tuple[list[bytes], int, bool],
) -> None:
    """A question, before or in the middle of what comes; at the end the connection breaks."""
    pieces, asked_after, unasked = answer

    async def asked() -> None:
        pool, connection, wire = upstream()
        await _arrive(connection, wire, pieces[:asked_after])
        head = None
        if not (wire.is_closing() or unasked):
            head = connection.ask(b"GET / HTTP/1.1\r\n\r\n")
            await _arrive(connection, wire, pieces[asked_after:])
        wire.abort()
        await settle()
        assert connection not in pool.connections
        if head is not None:
            # Whoever waits gets a reply, its end, or an error.
            assert head.done()
            with suppress(NoReply, Torn):
                reply = await head
                assert reply.status >= 0
                async with asyncio.timeout(1):
                    await reply.read()
            assert not connection.usable

    run(asked)
