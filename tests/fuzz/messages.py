"""Messages of HTTP/1.1, as they should be but for something (RFC 9112)."""

from typing import Final

from tests.fuzz.tape import Grammar, Tape
from tests.fuzz.texts import damaged, either

METHODS: Final = (b"POST", b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"CONNECT", b"PRI", b"x", b"")
TARGETS: Final = (
    *(b"/v1/chat/completions", b"/v1/messages", b"/feedback", b"/v1/models", b"*", b"/\xff"),
    *(b"http://a/v1/completions?x", b"/episode/%00/v1/responses", b"//", b"", b"/" + b"a" * 9_000),
)
VERSIONS: Final = (
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"",
)
STATUSES: Final = (
    *(b"200 OK", b"200", b"204 No Content", b"304 x", b"101 Switching Protocols", b"100 Continue"),
    *(b"103 Early Hints", b"999 \xff", b"-1 x", b"20 x", b"503 " + b"x" * 300),
)
HEADERS: Final = (
    *(b"Host: a", b"Content-Type: application/json", b"Content-Type: text/event-stream"),
    *(b"Connection: close", b"Connection: keep-alive", b"Connection: Upgrade, HTTP2-Settings"),
    *(b"Upgrade: h2c", b"Upgrade: websocket", b"Expect: 100-continue", b"Content-Encoding: gzip"),
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length: 5, 5", b"Content-Length:", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: gzip, chunked", b"Trailer: x", b"X: " + b"y" * 9_000, b" folded"),
    *(b"x-pawl-episode: e1", b"x-pawl-tool-status: ok", b"Idempotency-Key: k", b":", b"\x00: \xff"),
)
LINE_ENDS: Final = (b"\r\n",) * 6 + (b"\n", b"\r")
CHUNKS: Final = (b"5", b"2;ext=1", b"0", b"fffffffffffffffff", b"-1", b"", b" 5")
OPENINGS: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02",
    b"\r\n\r\n",
    b"GET /\r\n",
)


def _head(tape: Tape, first: bytes, framing: list[bytes]) -> bytes:
    lines = [first, *(tape.pick(HEADERS) for _ in range(tape.below(4))), *framing]
    return b"".join(line + tape.pick(LINE_ENDS) for line in [*lines, b""])


def _chunked(tape: Tape, body: bytes) -> bytes:
    if tape.rarely():
        return b"%b\r\n%b\r\n0\r\n" % (tape.pick(CHUNKS), body) + tape.pick(
            (b"\r\n", b"X: y\r\n\r\n")
        )
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"


def _framed(tape: Tape, first: bytes, body: bytes) -> bytes:
    match tape.below(4):
        case 0 | 1:
            return _head(tape, first, [b"Content-Length: %d" % len(body)]) + body
        case 2:
            return _head(tape, first, [b"Transfer-Encoding: chunked"]) + _chunked(tape, body)
        case _:
            return _head(tape, first, []) + body


def request(body: Grammar) -> Grammar:
    """One request with such a body."""

    def write(tape: Tape) -> bytes:
        first = b" ".join((tape.pick(METHODS), tape.pick(TARGETS), tape.pick(VERSIONS)))
        return _framed(tape, first, body(tape))

    return write


def reply(body: Grammar) -> Grammar:
    """One reply with such a body."""

    def write(tape: Tape) -> bytes:
        first = tape.pick(VERSIONS) + b" " + tape.pick(STATUSES)
        return _framed(tape, first, body(tape))

    return write


def several(message: Grammar) -> Grammar:
    """Some, one right after another, and sometimes what is no message at all."""

    def write(tape: Tape) -> bytes:
        found = b"".join(message(tape) for _ in range(1 + tape.below(3)))
        return tape.pick(OPENINGS) + found if tape.rarely() else found

    return damaged(write)


def small(tape: Tape) -> bytes:
    """A body that says nothing."""
    return tape.pick((b"", b"hello", b"{}", b"x" * 4_000))


def garbage(tape: Tape) -> bytes:
    """Bytes without any meaning."""
    return tape.bytes(60)


requests: Final[Grammar] = either(several(request(small)), several(request(small)), garbage)
replies: Final[Grammar] = either(several(reply(small)), several(reply(small)), garbage)
