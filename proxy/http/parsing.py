"""Make requests of a connection's bytes: check heads, and hand bodies to their exchange."""

from typing import TYPE_CHECKING, Final

import httptools
import structlog

from proxy.http import wire
from proxy.http.exchange import Exchange
from proxy.http.feeding import Feeding
from proxy.http.heads import VERSIONS, Refused, read_head, wrong_version
from proxy.http.wire import Headers

if TYPE_CHECKING:
    from proxy.http.connection import Connection

log = structlog.get_logger()

# Limit on a head, and on what is between the pieces of a body: chunk sizes, extensions, trailers.
MAX_HEAD_BYTES: Final = 256 * 1024


class RequestParser:
    """Parse the requests of one connection; httptools calls it back."""

    def __init__(self, connection: "Connection") -> None:
        """Begin with no bytes; requests and refusals go to `connection`, which is made."""
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._headers: Headers = []
        # Bytes that came since the last piece of a body, or since the end of the last head.
        self._overhead = 0
        # A new parser is being brought to the state of the one before it.
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

    def drop(self) -> Exchange | None:
        """Receive no more of the body under way, and return its request, if there is one."""
        dropped, self.receiving = self.receiving, None
        return dropped

    def _feed(self, data: bytes) -> None:
        """Parse bytes; an invalid request is refused and the connection closed."""
        if self._connection.closing:
            return
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self._refuse_for(error.__context__)
        except httptools.HttpParserError as error:
            self._connection.refuse(400, f"not HTTP/1.1: {error}")
        else:
            if self._overhead > MAX_HEAD_BYTES:
                why = f"a head or trailers of more than {MAX_HEAD_BYTES} bytes"
                self._connection.refuse(431, why)

    def _refuse_for(self, error: BaseException | None) -> None:
        """Refuse a request for the error that a callback raised."""
        if isinstance(error, Refused):
            self._connection.refuse(error.status, error.why)
        else:
            log.error("request_not_read", exc_info=error)
            self._connection.refuse(500, "the proxy failed to read the request; its log says why")

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        """Begin a request."""
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
        """Hand the request to the connection, which answers it or has it wait."""
        if self._resuming:
            return
        self.in_head = False
        self._overhead = 0
        self.heads += 1
        version = self._parser.get_http_version()
        if version not in VERSIONS:
            raise wrong_version(version)
        # An older client only has to read until we close: no kept connection, no chunks.
        modern = version == "1.1"
        exchange = Exchange(
            self._connection,
            self.method,
            self.target,
            self._headers,
            keep_alive=modern and self._parser.should_keep_alive(),
            chunks=modern,
            expects=read_head(self._headers, modern=modern),
        )
        self.receiving = exchange
        self._headers = []
        self._connection.take(exchange)

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._overhead = 0
        self.feeding.pieces += 1
        self.feeding.body_bytes += len(body)
        if self.receiving is not None:
            self.receiving.body.put(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        self.feeding.body_bytes = 0
        if self.receiving is not None and not self._parser.should_upgrade():
            self.receiving.body.end()
            self.receiving = None
            self._overhead = 0

    # An offer to upgrade is ignored (RFC 9110 §7.8 allows it).

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the body with a new parser: the old one takes what follows for another protocol."""
        exchange = self.receiving
        if exchange is None:
            self._connection.refuse(400, "an offer to upgrade without a request")
            return
        framing = [pair for pair in exchange.headers if pair[0].lower() in wire.FRAMING]
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(wire.head(b"POST / HTTP/1.1", framing))
        self._resuming = False
        if rest:
            self._feed(rest)
