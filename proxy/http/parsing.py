"""Parse a connection's bytes into requests: check heads, and hand bodies to their exchange.

Parsing must not hold up the event loop. A body of 256 KB in chunks of two bytes falls into 37,000
pieces, and parsing them takes longer than an ordinary call. So bytes are parsed in slices.
Connections whose slices fall into many pieces, or whose body is long, take turns; between two
turns, the event loop does other work for as long as the last turn took.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Final

import httptools
import structlog

from proxy.http import wire
from proxy.http.exchange import Brake, Exchange
from proxy.http.wire import Headers

if TYPE_CHECKING:
    from proxy.http.server import Connection

log = structlog.get_logger()

# Limit on a head, and on the bytes between pieces of a body: chunk sizes, extensions, trailers.
MAX_HEAD_BYTES: Final = 256 * 1024
# Versions of HTTP that are served.
VERSIONS: Final = ("1.1", "1.0")
# `uri-host [":" port]`, which may be empty (RFC 9110 §7.2, RFC 3986 §3.2.2).
_HOST: Final = re.compile(rb"(?:\[[0-9A-Za-z:._~%-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?\Z")
# A longer length may not fit 63 bits: servers may read different numbers (RFC 9110 §8.6).
MOST_DIGITS: Final = 18
# Bytes that are parsed at once.
SLICE_BYTES: Final = 16 * 1024
# A slice that falls into more pieces of a body than this takes long to parse.
MANY_PIECES: Final = 128
# Beyond this length a body is taken in turns: without turns, sixteen such bodies at once would copy
# 4 MB in each turn of the event loop.
LONG_BODY: Final = 2**20


class RequestParser:
    """Parse the requests of one connection; httptools calls it back."""

    def __init__(self, connection: "Connection") -> None:
        """Begin with no bytes; pass requests and refusals to `connection`, already connected."""
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._headers: Headers = []
        # Bytes that came since the last piece of a body, or since the end of the last head.
        self._overhead = 0
        # A new parser is being brought to the state of the previous parser.
        self._resuming = False
        self.feeding = Feeding(self._feed, connection.brake, connection.server.turns)
        self._target = b""
        self.in_head = False
        # Number of heads that have come whole.
        self.heads = 0
        # The request whose body is being received.
        self.receiving: Exchange | None = None

    @property
    def method(self) -> str:
        """Return the method of the request that is being parsed."""
        return self._parser.get_method().decode("latin-1")

    @property
    def target(self) -> str:
        """Return the target of the request that is being parsed, percent-encoded."""
        return self._target.decode("latin-1")

    def stop_receiving(self) -> Exchange | None:
        """Stop receiving the current body; return the request that it belongs to, or None."""
        dropped, self.receiving = self.receiving, None
        return dropped

    def _feed(self, data: bytes) -> None:
        """Parse bytes; an invalid request is refused and the connection closed."""
        if self._connection.closing:
            return
        self._overhead += len(data)
        offered: int | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offered = upgrade.args[0]
        except httptools.HttpParserCallbackError as error:
            self._refuse_for(error.__context__)
        except httptools.HttpParserError as error:
            self._connection.refuse(400, f"it is not HTTP/1.1: {error}")
        else:
            if self._overhead > MAX_HEAD_BYTES:
                why = f"its head or trailers have more than {MAX_HEAD_BYTES} bytes"
                self._connection.refuse(431, why)
        # Outside of the `except`: within it, the `__context__` of a later callback's error would be
        # the upgrade, and not the error that the callback raised.
        if offered is not None:
            self._go_on_without_upgrade(data[offered:])

    def _refuse_for(self, error: BaseException | None) -> None:
        """Refuse the current request because of the error that a callback raised."""
        if isinstance(error, UnreadableRequest):
            self._connection.refuse(error.status, error.why)
        else:
            log.error("request_not_read", exc_info=error)
            self._connection.refuse(500, "the proxy failed to read the request; its log says why")

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        self.in_head = True
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Add a part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header line; one after the body is a trailer and is dropped (RFC 9110 §6.5.1)."""
        if self.receiving is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Hand the request to the connection, which answers or queues it."""
        if self._resuming:
            return
        self.in_head = False
        self._overhead = 0
        self.heads += 1
        version = self._parser.get_http_version()
        if version not in VERSIONS:
            # HTTP/0.9 has no heads at all.
            status = 400 if version == "0.9" else 505
            raise UnreadableRequest(
                status, f"HTTP/{version} is not served here: send the request as HTTP/1.1"
            )
        # An older client only has to read until we close: no kept connection, no chunks.
        modern = version == "1.1"
        exchange = Exchange(
            self._connection,
            self.method,
            self.target,
            self._headers,
            keep_alive=modern and self._parser.should_keep_alive(),
            chunks=modern,
            expects=check_head(self._headers, modern=modern),
        )
        self.receiving = exchange
        self._headers = []
        self._connection.start_or_queue(exchange)

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        self.feeding.pieces += 1
        self.feeding.body_bytes += len(body)
        if self.receiving is not None:
            self.receiving.body.put(body)

    def on_message_complete(self) -> None:
        """Mark the request's body as complete."""
        self.feeding.body_bytes = 0
        if self.receiving is not None and not self._parser.should_upgrade():
            self.receiving.body.end()
            self.receiving = None
            self._overhead = 0

    # An offer to upgrade is ignored (RFC 9110 §7.8 allows it).

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Parse the body with a new parser: the old one treats it as another protocol."""
        exchange = self.receiving
        if exchange is None:
            self._connection.refuse(400, "it offers an upgrade of the protocol and has no head")
            return
        framing = [pair for pair in exchange.headers if pair[0].lower() in wire.FRAMING]
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(wire.message_head(b"POST / HTTP/1.1", framing))
        self._resuming = False
        if rest:
            self._feed(rest)


class UnreadableRequest(ValueError):
    """Report a request that must be refused with `status`; the message says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


def check_head(headers: Headers, *, modern: bool) -> bool:
    """Check a head, and return whether the client waits for `100 Continue` to send its body.

    `modern`: the request is HTTP/1.1.

    Raises:
        UnreadableRequest: the request does not have exactly one valid host (RFC 9112 §3.2), or its
            body has a transfer coding or a length that cannot be passed on as it is.
    """
    expects = False
    hosts = 0
    for name, value in headers:
        size = len(name)
        if size == 4:
            if name.lower() == b"host":
                hosts += 1
                _check_host(value)
        elif size == 6:
            if name.lower() == b"expect":
                expects = value.lower() == b"100-continue"
        elif size == 14 and len(value) > MOST_DIGITS and name.lower() == b"content-length":
            raise UnreadableRequest(400, f"its Content-Length has more than {MOST_DIGITS} digits")
        elif size == 17 and name.lower() == b"transfer-encoding" and value.lower() != b"chunked":
            raise UnreadableRequest(
                400, "its Transfer-Encoding is not chunked, and no other can be passed on"
            )
    if hosts != 1 and (modern or hosts):
        hosts_given = "no Host header" if not hosts else "more than one Host header"
        raise UnreadableRequest(
            400, f"the request has {hosts_given}: RFC 9112 section 3.2 wants exactly one"
        )
    return expects


@lru_cache(maxsize=64)
def _check_host(value: bytes) -> None:
    if _HOST.match(value) is None:
        raise UnreadableRequest(400, "the Host header is not a host name with an optional port")


class SlowWork:
    """Queue of slow work of all connections: after each piece, pause as long as it took."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._rest_until = 0.0

    def queue_work(self, work: Callable[[], None]) -> None:
        """Queue `work`, to be called in its turn."""
        self._waiting.append(work)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        rest_s = max(0.0, self._rest_until - monotonic())
        asyncio.get_running_loop().call_later(rest_s, self._next)

    def _next(self) -> None:
        began = monotonic()
        try:
            self._waiting.popleft()()
        finally:
            now = monotonic()
            self._rest_until = now + (now - began)
            self._scheduled = False
            if self._waiting:
                self._schedule()


class Feeding:
    """Pass one connection's bytes to its parser, at once or in turns with other connections."""

    def __init__(self, feed: Callable[[bytes], None], source: Brake, turns: SlowWork) -> None:
        """Begin with no bytes; `feed` parses bytes, and `source` is paused while bytes wait.

        All connections share `turns`, which says when waiting bytes are parsed.
        """
        self._feed = feed
        self._source = source
        self._turns = turns
        self._unparsed = b""
        self._takes_long = False
        # Number of pieces that the parser has made of the present slice; it counts them here.
        self.pieces = 0
        # Number of bytes of the present body that have come; the parser counts them here.
        self.body_bytes = 0
        self.waiting = False

    def put(self, data: bytes) -> None:
        """Parse received bytes: now, or once it is this connection's turn."""
        if self.waiting:
            self._unparsed += data
        elif self._takes_long or self.body_bytes > LONG_BODY:
            self._unparsed = data
            self._wait()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size:
            self.pieces = 0
            self._feed(data[at : at + SLICE_BYTES] if size > SLICE_BYTES else data)
            at += SLICE_BYTES
            self._takes_long = self.pieces > MANY_PIECES
            if self._takes_long and at < size:
                self._unparsed = data[at:]
                self._wait()
                return

    def _wait(self) -> None:
        self.waiting = True
        self._source.pause_reading()
        self._turns.queue_work(self._go_on)

    def _go_on(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self.waiting = False
        self._source.resume_reading()
        self._parse(data)
