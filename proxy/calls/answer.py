"""Pass a reply back to the client as it comes, all but its end.

An answer is received first (`receive`) and its end released later (`release`): between the two the
call is recorded, so that the end leaves only once the record is durable. An answer changes while it
is received, for a call can be broken off at any chunk, and its record says how far the reply came.
A call holds its answer, and no answer its call: neither would be freed until garbage is collected.
"""

import zlib
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import TYPE_CHECKING, Final

import structlog

from proxy.errors import ReplyTooLarge, ReplyTorn
from proxy.formats.base import ReplyParser
from proxy.http.client import Torn
from proxy.http.wire import Headers, for_client
from proxy.intake import Claim
from proxy.metrics import FIRST_CHUNK_SECONDS
from proxy.upstreams.server import Reply, as_came
from store.records import CallStatus

if TYPE_CHECKING:
    from proxy.calls.call import Call

log = structlog.get_logger()

ERRORS: Final = 400
# A reply in one piece is in memory as it comes, as it leaves and as it is recorded.
REPLY_COPIES: Final = 3
# A reply's bytes wait in memory until its end; beyond this size they are deflated.
DEFLATE_FROM: Final = 64 * 1024
LEVEL: Final = 1


class StreamedAnswer:
    """Give the client a reply of server-sent events, event by event."""

    streamed = True
    __slots__ = (
        "_headers",
        "_held",
        "_pieces",
        "_reply",
        "_why_torn",
        "buffer",
        "first_chunk_ms",
        "parser",
    )

    _pieces: AsyncIterator[bytes]

    def __init__(self, reply: Reply, headers: Headers, claim: Claim) -> None:
        """Begin an answer of which nothing has come.

        Args:
            reply: the upstream's, of which the head has come.
            headers: our own, which the answer gets.
            claim: what the call holds of the memory budget.
        """
        self._reply = reply
        self._headers = headers
        self._held = b""
        self._why_torn: str | None = None
        self.buffer = ReplyBuffer(claim.add)
        self.parser: ReplyParser | None = None
        # From the request's arrival to the first chunk.
        self.first_chunk_ms: float | None = None

    async def receive(self, call: "Call") -> CallStatus:
        """Pass the reply on as it comes, and return how it ended, but keep its end back."""
        reply, buffer = self._reply, self.buffer
        exchange, routed = call.exchange, call.routed
        served_name = routed.serving.served_name
        parser = self.parser = call.format.reply(routed.request, served_name, streamed=True)
        exchange.begin(reply.status, reply.reason, [*for_client(reply.headers), *self._headers])
        pieces = self._pieces = reply.pieces()
        try:
            async for chunk in pieces:
                if self.first_chunk_ms is None:
                    seconds = perf_counter() - call.arrived_at
                    self.first_chunk_ms = seconds * 1000
                    FIRST_CHUNK_SECONDS.observe(seconds)
                buffer.add(chunk)
                exchange.write(parser.feed(chunk))
                if parser.at_end:
                    break
                await exchange.drained()
        except Torn as error:
            if not parser.ended:
                self._why_torn = str(error)
                log.warning("stream_torn", call=call.name, reason=self._why_torn)
                return "truncated"
        self._held = b"" if parser.at_end else parser.finish()
        return "complete" if parser.ended else "truncated"

    async def release(self, call: "Call") -> None:
        """Send the end; tear a reply that broke off, as a clean end would make it look whole."""
        exchange, parser = call.exchange, self.parser
        if self._why_torn is not None:
            message = f"The model server's reply broke off: {self._why_torn}."
            exchange.write(call.format.errors.event(message, "upstream_error"))
            exchange.tear()
            return
        if parser is not None and parser.at_end:
            # The reply's end was seen. The upstream may send more before it closes.
            if not self._reply.ended:
                await self._pass_rest(call, parser)
            self._held = parser.finish()
        exchange.end(self._held)

    async def _pass_rest(self, call: "Call", parser: ReplyParser) -> None:
        """Pass on what follows the reply's last event, until the upstream closes its body.

        The client has that event and the record is made, so the rest is not recorded.
        """
        exchange = call.exchange
        exchange.write(parser.release())
        try:
            async for chunk in self._pieces:
                exchange.write(parser.feed(chunk))
                await exchange.drained()
        except Torn as error:
            log.info("stream_torn_after_its_end", call=call.name, reason=str(error))


class WholeAnswer:
    """Give the client a reply in one piece, once it is recorded."""

    streamed = False
    first_chunk_ms = None
    __slots__ = ("_body", "_headers", "_out", "_reply", "buffer", "parser")

    def __init__(self, reply: Reply, headers: Headers, claim: Claim) -> None:
        """Begin an answer of which nothing has come; the arguments are `StreamedAnswer`'s."""
        self._reply = reply
        self._headers = headers
        self._body = self._out = b""
        self.buffer = ReplyBuffer(claim.add)
        self.parser: ReplyParser | None = None

    async def receive(self, call: "Call") -> CallStatus:
        """Read the whole reply; nothing of it is passed on before its record is durable.

        Raises:
            ReplyTorn: the reply broke off; what came of it is in the buffer.
            ReplyTooLarge: it is longer than `PAWL_MAX_REPLY_MB`.
        """
        reply, most = self._reply, call.parts.max_reply
        length = reply.header(b"content-length")
        if length is not None and length.isdigit():
            call.claim.add(REPLY_COPIES * min(int(length), most))
        try:
            body = await reply.read(most)
        except Torn as error:
            log.warning("reply_torn", call=call.name, reason=str(error))
            self.buffer.keep(reply.unread())
            raise ReplyTorn(
                f"The model server's reply broke off before its end: {error}. "
                "Nothing of it was passed on",
                code="upstream_broke",
            ) from error
        if body is None:
            raise ReplyTooLarge(
                "The model server's reply, which comes in one piece, is larger than this proxy "
                "holds to record it; PAWL_MAX_REPLY_MB sets how much, and a stream has no limit"
            )
        self.buffer.keep(body)
        routed = call.routed
        parser = self.parser = call.format.reply(
            routed.request, routed.serving.served_name, streamed=False, status=reply.status
        )
        parser.feed(body)
        self._body, self._out = body, parser.finish()
        return "complete"

    async def release(self, call: "Call") -> None:
        """Send the reply, once its record is durable."""
        reply = self._reply
        as_sent, out = as_came(reply, self._body, self._out)
        headers = [*for_client(as_sent), *self._headers]
        call.exchange.reply(reply.status, reply.reason, headers, out)


Answer = StreamedAnswer | WholeAnswer


class ReplyBuffer:
    """Keep a reply's bytes as they come; a long stream is compressed in memory."""

    __slots__ = ("_deflater", "_grown", "_packed", "_pieces", "_size")

    def __init__(self, grown: Callable[[int], None] | None = None) -> None:
        """Begin empty; `grown` is called with the size of each compressed piece that is kept."""
        self._grown = grown
        self._pieces: list[bytes] = []
        self._size = 0
        self._packed: list[bytes] = []
        self._deflater: zlib._Compress | None = None

    def keep(self, data: bytes) -> None:
        """Keep a reply that came in one piece: it is in memory anyway."""
        self._pieces.append(data)

    def add(self, data: bytes) -> None:
        """Keep a piece of a stream."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > DEFLATE_FROM:
            self._pack()

    def _pack(self) -> None:
        if self._deflater is None:
            self._deflater = zlib.compressobj(LEVEL)
        packed = self._deflater.compress(b"".join(self._pieces))
        self._packed.append(packed)
        self._pieces, self._size = [], 0
        if self._grown is not None:
            self._grown(len(packed))

    def take(self) -> tuple[bytes, bool]:
        """Return all bytes, and whether they are deflated (zlib format, RFC 1950)."""
        if self._deflater is None:
            return b"".join(self._pieces), False
        self._pack()
        return b"".join([*self._packed, self._deflater.flush()]), True
