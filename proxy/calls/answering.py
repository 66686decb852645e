"""Take the third step of a call: pass its reply back as it comes, all but its end.

An answer is received first (`receive`) and its end released later (`release`): between the two the
call is recorded, so that the end leaves only once the record is durable. An answer changes while it
is received, for a call can be broken off at any chunk, and its record says how far the reply came.
"""

import zlib
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Final, Protocol

import structlog

from proxy.calls.asking import Arrived, CallIdentity
from proxy.calls.routing import Routed
from proxy.error_replies import UPSTREAM_SAID
from proxy.errors import ReplyTooLarge, ReplyTorn
from proxy.exploring import header_of
from proxy.formats.base import ReplyParser
from proxy.http.client import Torn
from proxy.http.wire import Headers, for_client
from proxy.intake import Claim
from proxy.metrics import FIRST_CHUNK_SECONDS
from proxy.upstreams.replies import Reply, as_came, comes_in_events, readable
from store.records import CallStatus

log = structlog.get_logger()

ERRORS: Final = 400
REPLY_COPIES: Final = 3
# A reply's bytes wait in memory until its end; beyond this size they are deflated.
DEFLATE_FROM: Final = 64 * 1024
LEVEL: Final = 1


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


class Answer(Protocol):
    """Pass a reply on to the client, and know how far it has come.

    `first_chunk_ms` is the time from the request's arrival to the first chunk of a stream;
    `streamed` says whether it is one.
    """

    streamed: bool
    tape: ReplyBuffer
    first_chunk_ms: float | None

    @property
    def parser(self) -> ReplyParser | None:
        """Return what follows the reply, or None before it is there."""

    async def receive(self) -> CallStatus:
        """Take the reply and pass it on, all but its end; return how the call ended.

        Raises:
            ProxyError: the reply cannot be passed on.
        """

    async def release(self) -> None:
        """Let the reply's end leave, once the record is durable."""


def answer_of(
    reply: Reply, arrived: Arrived, routed: Routed, headers: Headers, claim: Claim, max_reply: int
) -> Answer:
    """Return the answer that passes a reply on: a stream as it comes, any other in one piece.

    Args:
        reply: the upstream's reply.
        arrived: the call.
        routed: the request that is answered.
        headers: our own headers, which the reply gets.
        claim: the call's part of the memory budget.
        max_reply: longest reply in one piece, in bytes.

    Raises:
        UnreadableCoding: what was added to the request could not be removed from the reply.
    """
    if routed.changed:
        reply = readable(reply)
    ours = [*headers, UPSTREAM_SAID] if reply.status >= ERRORS else headers
    if comes_in_events(reply):
        return StreamedAnswer(reply, arrived, routed, ours, claim)
    return WholeAnswer(reply, arrived, routed, ours, claim, max_reply)


def own_headers(arrived: Arrived, asked: CallIdentity, routed: Routed) -> Headers:
    """Return the headers that a reply to a call gets: names, version, exploration, warnings."""
    headers = [
        (b"x-pawl-call", arrived.name.encode()),
        (b"x-pawl-episode", asked.identity.name.encode()),
    ]
    serving = routed.serving
    if serving.policy is not None:
        version = "" if serving.version is None else f"@{serving.version}"
        headers.append((b"x-pawl-policy", f"{serving.policy}{version}".encode()))
    if routed.explored is not None:
        headers.append((b"x-pawl-explored", header_of(routed.explored)))
    if asked.warnings:
        text = "; ".join(asked.warnings).replace("\r", " ").replace("\n", " ")
        headers.append((b"x-pawl-warning", text.encode(errors="replace")))
    return headers


class StreamedAnswer:
    """Give the client a reply of server-sent events, event by event."""

    streamed = True
    __slots__ = (
        "_arrived",
        "_headers",
        "_held",
        "_pieces",
        "_reply",
        "_routed",
        "_why_torn",
        "first_chunk_ms",
        "parser",
        "tape",
    )

    _pieces: AsyncIterator[bytes]

    def __init__(
        self, reply: Reply, arrived: Arrived, routed: Routed, headers: Headers, claim: Claim
    ) -> None:
        """Begin an answer of which nothing has come; arguments are those of `answer_of`."""
        self._reply = reply
        self._arrived = arrived
        self._routed = routed
        self._headers = headers
        self._held = b""
        self._why_torn: str | None = None
        self.tape = ReplyBuffer(claim.add)
        self.parser: ReplyParser | None = None
        self.first_chunk_ms: float | None = None

    async def receive(self) -> CallStatus:
        """Pass the reply on as it comes, and return how it ended, but keep its end back."""
        arrived, reply, sent, tape = self._arrived, self._reply, self._routed, self.tape
        exchange, served_name = arrived.exchange, sent.serving.served_name
        parser = arrived.format.reply(sent.request, served_name, streamed=True)
        self.parser = parser
        exchange.begin(reply.status, reply.reason, [*for_client(reply.headers), *self._headers])
        pieces = self._pieces = reply.pieces()
        try:
            async for chunk in pieces:
                if self.first_chunk_ms is None:
                    self._note_first_chunk()
                tape.add(chunk)
                exchange.write(parser.feed(chunk))
                if parser.at_end:
                    break
                await exchange.drained()
        except Torn as error:
            if not parser.ended:
                self._why_torn = str(error)
                log.warning("stream_torn", call=arrived.name, reason=self._why_torn)
                return "truncated"
        self._held = b"" if parser.at_end else parser.finish()
        return "complete" if parser.ended else "truncated"

    async def release(self) -> None:
        """Send the end; tear a reply that broke off, as a clean end would make it look whole."""
        if self._why_torn is not None:
            self._tear(self._why_torn)
            return
        exchange, parser = self._arrived.exchange, self.parser
        if parser is not None and parser.at_end:
            # The reply's end was seen. The upstream may send more before it closes.
            if not self._reply.ended:
                await self._pass_rest(parser)
            self._held = parser.finish()
        exchange.end(self._held)

    async def _pass_rest(self, parser: ReplyParser) -> None:
        """Pass on what follows the reply's last event, until the upstream closes its body.

        The client has that event and the record is made, so the rest is not recorded.
        """
        exchange = self._arrived.exchange
        exchange.write(parser.release())
        try:
            async for chunk in self._pieces:
                exchange.write(parser.feed(chunk))
                await exchange.drained()
        except Torn as error:
            log.info("stream_torn_after_its_end", call=self._arrived.name, reason=str(error))

    def _tear(self, why: str) -> None:
        """Break the stream off, with an error event of its API."""
        exchange, message = self._arrived.exchange, f"The model server's reply broke off: {why}."
        exchange.write(self._arrived.format.errors.event(message, "upstream_error"))
        exchange.tear()

    def _note_first_chunk(self) -> None:
        seconds = perf_counter() - self._arrived.at
        self.first_chunk_ms = seconds * 1000
        FIRST_CHUNK_SECONDS.observe(seconds)


class WholeAnswer:
    """Give the client a reply in one piece, once it is recorded."""

    streamed = False
    __slots__ = (
        "_arrived",
        "_body",
        "_claim",
        "_headers",
        "_max_reply",
        "_out",
        "_reply",
        "_routed",
        "first_chunk_ms",
        "parser",
        "tape",
    )

    def __init__(
        self,
        reply: Reply,
        arrived: Arrived,
        routed: Routed,
        headers: Headers,
        claim: Claim,
        max_reply: int,
    ) -> None:
        """Begin an answer of which nothing has come; arguments are those of `answer_of`."""
        self._reply = reply
        self._arrived = arrived
        self._routed = routed
        self._headers = headers
        self._claim = claim
        self._max_reply = max_reply
        self._body = self._out = b""
        self.tape = ReplyBuffer(claim.add)
        self.parser: ReplyParser | None = None
        self.first_chunk_ms: float | None = None

    async def receive(self) -> CallStatus:
        """Read the whole reply; nothing of it is passed on before its record is durable."""
        arrived, reply, sent = self._arrived, self._reply, self._routed
        length = reply.header(b"content-length")
        if length is not None and length.isdigit():
            # In memory as it comes, as it leaves and as it is recorded.
            self._claim.add(REPLY_COPIES * min(int(length), self._max_reply))
        self._body = await self._take()
        parser = self.parser = arrived.format.reply(
            sent.request, sent.serving.served_name, streamed=False, status=reply.status
        )
        parser.feed(self._body)
        self._out = parser.finish()
        return "complete"

    async def _take(self) -> bytes:
        """Return the reply's body, after keeping what came of it, whole or torn.

        Raises:
            ReplyTorn: the reply broke off.
            ReplyTooLarge: it is longer than `max_reply` bytes.
        """
        reply = self._reply
        try:
            body = await reply.read(self._max_reply)
        except Torn as error:
            log.warning("reply_torn", call=self._arrived.name, reason=str(error))
            self.tape.keep(reply.unread())
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
        self.tape.keep(body)
        return body

    async def release(self) -> None:
        """Send the reply, once its record is durable."""
        reply = self._reply
        as_sent, out = as_came(reply, self._body, self._out)
        headers = [*for_client(as_sent), *self._headers]
        self._arrived.exchange.reply(reply.status, reply.reason, headers, out)
