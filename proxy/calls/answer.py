"""Pass a reply to the client as it arrives, and hold its end back until the call is recorded.

`receive` reads the reply, and `send_rest` sends its end. Between the two the call is recorded, so
that the end leaves only once the record is durable. An answer changes while it is received: a call
can break off at any chunk, and its record shows how much of the reply arrived. A call refers to its
answer, but an answer does not refer to its call: only the garbage collector would free the cycle.

The bytes that an answer holds are charged to the memory budget as they arrive. While the budget is
full, the upstream is not read further. A reply that is too long, or finds no room in time, is still
passed on to its end, but only its beginning is recorded: a client is never cut off.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final

import structlog

from proxy.errors import Overloaded, ReplyTorn
from proxy.formats.base import ReplyParser
from proxy.http.client import Torn
from proxy.http.wire import Headers, headers_for_client
from proxy.intake import BudgetShare
from proxy.metrics import FIRST_CHUNK_SECONDS
from proxy.upstreams.server import DecodedReply, Reply, restore_coding
from store.records import CallStatus

if TYPE_CHECKING:
    from proxy.calls.call import Call

log = structlog.get_logger()

FIRST_ERROR_STATUS: Final = 400
# Copies in memory of a non-streamed reply, or of a stream's line, until it is recorded.
REPLY_COPIES: Final = 6
# Longest wait for room in the memory budget, and the pause between two tries, in seconds.
ROOM_WAIT_S: Final = 10.0
ROOM_RETRY_S: Final = 0.05
# A reply is held in memory until its end. Beyond this size it is deflated; a reply that is too long
# is cut to this size.
DEFLATE_FROM: Final = 64 * 1024
DEFLATE_LEVEL: Final = 1
# Overhead of a deflated piece in memory (approximate).
PACKED_BYTES: Final = 256


async def wait_for_room(claim: BudgetShare, size: int, within_s: float) -> bool:
    """Claim `size` bytes in all; return False if there is no room for them within `within_s`."""
    until = monotonic() + within_s
    while True:
        try:
            claim.claim_at_least(size)
        except Overloaded:
            if monotonic() >= until:
                return False
            await asyncio.sleep(ROOM_RETRY_S)
        else:
            return True


def max_held_bytes(call: "Call") -> int:
    """Return how many bytes of a non-streamed reply, or of a stream's line, may be held in memory.

    The budget has room for all copies of them, and as much as one more copy for other data.
    """
    return min(call.parts.max_reply, call.parts.intake.budget.limit // (REPLY_COPIES + 1))


class StreamedAnswer:
    """A reply of server-sent events, passed on as they arrive."""

    streamed = True
    __slots__ = (
        "_base",
        "_end",
        "_headers",
        "_pieces",
        "_reply",
        "_why_torn",
        "buffer",
        "first_chunk_ms",
        "parser",
    )

    _pieces: AsyncIterator[bytes]

    def __init__(self, reply: Reply, headers: Headers, claim: BudgetShare) -> None:
        """Begin an empty answer.

        Args:
            reply: the upstream's reply, whose head has arrived.
            headers: the headers that the proxy adds.
            claim: the part of the memory budget that request and reply hold.
        """
        self._reply = reply
        self._headers = headers
        # The last bytes, which are sent once the record is durable.
        self._end = b""
        self._why_torn: str | None = None
        # The bytes of the budget that the request holds; the reply's are added to them.
        self._base = claim.held
        self.buffer = ReplyBuffer()
        self.parser: ReplyParser | None = None
        # Milliseconds from the request's arrival to the first chunk.
        self.first_chunk_ms: float | None = None

    async def receive(self, call: "Call") -> CallStatus:
        """Pass the reply on as it arrives, hold its end back, and return how it ended."""
        reply, buffer = self._reply, self.buffer
        exchange, routed = call.exchange, call.routed
        served_name = routed.serving.served_name
        parser = self.parser = call.format.reply_parser(routed.request, served_name, streamed=True)
        exchange.begin(
            reply.status, reply.reason, [*headers_for_client(reply.headers), *self._headers]
        )
        exchange.ping = call.format.ping
        pieces = self._pieces = reply.pieces()
        try:
            async for chunk in pieces:
                if self.first_chunk_ms is None:
                    seconds = perf_counter() - call.arrived_at
                    self.first_chunk_ms = seconds * 1000
                    FIRST_CHUNK_SECONDS.observe(seconds)
                has_grown = buffer.add(chunk)
                exchange.write(parser.feed(chunk))
                if has_grown:
                    await self._charge_held_bytes(call, parser)
                if parser.at_end:
                    break
                await exchange.wait_until_drained()
        except Torn as error:
            if not parser.ended:
                self._why_torn = str(error)
                log.warning("stream_torn", call=call.name, reason=self._why_torn)
                return "truncated"
        self._end = b"" if parser.at_end else parser.finish()
        return "complete" if parser.ended else "truncated"

    async def _charge_held_bytes(self, call: "Call", parser: ReplyParser) -> None:
        """Charge the bytes held so far to the budget; without room for them, hold fewer.

        Of a stream that is too long only the beginning is stored; its lines are passed on as
        before. A line that is too long is passed on as it arrives, added fields included.
        """
        buffer, within_s = self.buffer, ROOM_WAIT_S
        if buffer.dropped:
            parser.forget()
            within_s = 0.0
        wanted = (
            self._base + buffer.held_bytes + parser.gathered + REPLY_COPIES * parser.waiting_bytes
        )
        fits = parser.waiting_bytes <= max_held_bytes(call) and await wait_for_room(
            call.claim, wanted, within_s
        )
        if not fits and parser.waiting_bytes > DEFLATE_FROM:
            call.exchange.write(parser.pass_buffered_line())
        if not (buffer.dropped or (fits and buffer.arrived_bytes <= call.parts.max_reply)):
            log.warning("reply_too_long", call=call.name, bytes=buffer.arrived_bytes)
            buffer.drop_all_but_beginning()
            parser.forget()
            call.claim.charge(self._base - call.claim.held)

    async def send_rest(self, call: "Call") -> None:
        """Send the reply's end; if it broke off, send an error, and close without a clean end."""
        exchange, parser = call.exchange, self.parser
        if self._why_torn is not None:
            message = f"The model server's reply broke off: {self._why_torn}."
            exchange.write(call.format.errors.event(message, "upstream_error"))
            exchange.tear()
            return
        if parser is not None and parser.at_end:
            # The reply's end was seen. The upstream may send more before it closes.
            if not self._reply.fully_read:
                await self._pass_on_until_closed(call, parser)
            self._end = parser.finish()
        exchange.end(self._end)

    async def _pass_on_until_closed(self, call: "Call", parser: ReplyParser) -> None:
        """Pass on the last event and all bytes after it, until the upstream ends the body.

        The record is made already, so the bytes after the last event are not recorded.
        """
        exchange = call.exchange
        exchange.write(parser.release())
        try:
            async for chunk in self._pieces:
                exchange.write(parser.feed(chunk))
                if parser.waiting_bytes > DEFLATE_FROM:
                    exchange.write(parser.pass_buffered_line())
                await exchange.wait_until_drained()
        except Torn as error:
            log.info("stream_torn_after_its_end", call=call.name, reason=str(error))


class WholeAnswer:
    """A reply that is not a stream, sent once its record is durable."""

    streamed = False
    first_chunk_ms = None
    __slots__ = ("_base", "_body", "_headers", "_out", "_passes", "_reply", "buffer", "parser")

    def __init__(self, reply: Reply, headers: Headers, claim: BudgetShare) -> None:
        """Begin an empty answer, with the arguments of `StreamedAnswer`."""
        self._reply = reply
        self._headers = headers
        self._body = self._out = b""
        self._base = claim.held
        # Whether the reply is too long to be held, and therefore passed on as it arrives.
        self._passes = False
        self.buffer = ReplyBuffer()
        self.parser: ReplyParser | None = None

    async def receive(self, call: "Call") -> CallStatus:
        """Read the whole reply, to be sent by `send_rest`; return how it ended.

        A reply that is too long to be held is passed on as it arrives, all but its last piece.

        Raises:
            ReplyTorn: the reply broke off; the bytes that arrived are in the buffer.
        """
        reply = self._reply
        try:
            body = await self._read(call)
            if body is None:
                return await self._pass_on_as_it_arrives(call)
        except Torn as error:
            log.warning("reply_torn", call=call.name, reason=str(error))
            if not self._passes:
                self.buffer.keep_uncompressed(reply.unread_bytes())
            raise ReplyTorn(
                f"The model server's reply broke off before its end: {error}. "
                "No part of the reply was passed on",
                code="upstream_broke",
            ) from error
        self.buffer.keep_uncompressed(body)
        routed = call.routed
        parser = self.parser = call.format.reply_parser(
            routed.request, routed.serving.served_name, streamed=False, status=reply.status
        )
        parser.feed(body)
        self._body, self._out = body, parser.finish()
        return "complete"

    async def _read(self, call: "Call") -> bytes | None:
        """Return the whole reply, or None if it is too long or the budget has no room in time.

        Raises:
            Torn: the reply broke off.
        """
        reply, claim, most = self._reply, call.claim, max_held_bytes(call)
        wanted = self._base
        length = reply.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > most:
            return None

        def charge(so_far: int) -> None:
            nonlocal wanted
            wanted = self._base + REPLY_COPIES * so_far
            claim.claim_at_least(wanted)

        while await wait_for_room(claim, wanted, ROOM_WAIT_S):
            with suppress(Overloaded):
                body = await reply.read(most, charge)
                # The last bytes, or the decoded body, are charged whether or not there is room.
                wanted = self._base + REPLY_COPIES * len(body or b"")
                claim.charge(max(wanted - claim.held, 0))
                return body
        return None

    async def _pass_on_as_it_arrives(self, call: "Call") -> CallStatus:
        """Pass on all but the last piece of a reply that is too long to be held, as it arrives.

        Raises:
            Torn: the reply broke off.
        """
        reply, exchange, buffer = self._reply, call.exchange, self.buffer
        if isinstance(reply, DecodedReply):
            # The reply is passed on in its coding, and its bytes are counted but not recorded.
            self._out, reply = reply.raw, reply.coded
            buffer.drop_all_but_beginning()
            buffer.add(self._out)
        self._passes = True
        log.warning("reply_too_long", call=call.name, bytes=call.claim.held // REPLY_COPIES)
        head = reply.status, reply.reason, [*headers_for_client(reply.headers), *self._headers]
        length = reply.header(b"content-length")
        if length is None:
            exchange.begin(*head)
        else:
            exchange.begin_sized(*head, length)
        async for piece in reply.pieces():
            exchange.write(self._out)
            self._out = piece
            if buffer.dropped:
                buffer.add(piece)
            else:
                buffer.keep_uncompressed(piece)
                buffer.drop_all_but_beginning()
            await exchange.wait_until_drained()
            call.claim.charge(self._base + len(piece) - call.claim.held)
        return "complete"

    async def send_rest(self, call: "Call") -> None:
        """Send the reply, or only its last piece if the others were passed on already."""
        if self._passes:
            call.exchange.end(self._out)
            return
        reply = self._reply
        as_sent, out = restore_coding(reply, self._body, self._out)
        headers = [*headers_for_client(as_sent), *self._headers]
        call.exchange.reply(reply.status, reply.reason, headers, out)


Answer = StreamedAnswer | WholeAnswer


class ReplyBuffer:
    """The bytes of a reply that have arrived; a long stream is compressed in memory."""

    __slots__ = ("_deflater", "_packed", "_packed_bytes", "_pieces", "_size", "_total", "dropped")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        # Number of bytes that arrived before `_pieces`.
        self._total = 0
        self._packed: list[bytes] = []
        self._packed_bytes = 0
        self._deflater: zlib._Compress | None = None
        self.dropped = False

    @property
    def held_bytes(self) -> int:
        """Return how many bytes are kept in memory."""
        return self._packed_bytes + self._size

    @property
    def arrived_bytes(self) -> int:
        """Return how many bytes have arrived."""
        return self._total + self._size

    def keep_uncompressed(self, data: bytes) -> None:
        """Keep bytes uncompressed: a non-streamed reply is in memory anyway."""
        self._pieces.append(data)
        self._size += len(data)

    def add(self, data: bytes) -> bool:
        """Keep a piece of a stream; return True each time `DEFLATE_FROM` more bytes have come."""
        if not self.dropped:
            self._pieces.append(data)
        self._size += len(data)
        if self._size <= DEFLATE_FROM:
            return False
        if self.dropped:
            self._total, self._size = self.arrived_bytes, 0
        else:
            self._deflate()
        return True

    def drop_all_but_beginning(self) -> None:
        """Keep only the first `DEFLATE_FROM` bytes; further bytes are only counted."""
        data, is_deflated = self.kept_bytes()
        if is_deflated:
            data = zlib.decompressobj().decompress(data, DEFLATE_FROM)
        data = data[:DEFLATE_FROM]
        self._total, self._size, self.dropped = self.arrived_bytes, 0, True
        self._pieces, self._packed, self._packed_bytes, self._deflater = [data], [], 0, None

    def _deflate(self) -> None:
        if self._deflater is None:
            self._deflater = zlib.compressobj(DEFLATE_LEVEL)
        packed = self._deflater.compress(b"".join(self._pieces))
        self._packed.append(packed)
        self._packed_bytes += len(packed) + PACKED_BYTES
        self._total += self._size
        self._pieces, self._size = [], 0

    def kept_bytes(self) -> tuple[bytes, bool]:
        """Return all bytes that are kept, and whether they are deflated (zlib, RFC 1950)."""
        if self._deflater is None:
            return b"".join(self._pieces), False
        self._deflate()
        return b"".join([*self._packed, self._deflater.flush()]), True
