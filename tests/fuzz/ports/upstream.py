"""A model server that takes nothing but sound requests that it may be asked, and notes the rest.

It has a parser of its own: what a lenient one repairs would hide what the proxy lets through.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from tests.support.servers.fake_upstream import stream_chunks, whole_reply

Pairs = list[tuple[bytes, bytes]]
# RFC 9112 §3 and §5, without anything that a recipient only tolerates.
FIRST: Final = re.compile(rb"([A-Z]+) (/[!-~\x80-\xff]*) HTTP/1\.1\Z")
LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t\x20-\x7e\x80-\xff]*)\Z")
CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
# Headers of one connection, or of the proxy and its clients.
NOT_HERE: Final = frozenset(
    b"connection keep-alive te trailer upgrade proxy-authorization proxy-authenticate "
    b"proxy-connection http2-settings expect x-api-key api-key".split()
)
MODELS: Final = ("m", "a-writes@1", "m@1")


class Heard(NamedTuple):
    """One request, as its bytes say."""

    method: bytes
    target: bytes
    headers: Pairs
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header, by its name in lower case."""
        return [value for one, value in self.headers if one.lower() == name]


class Unsound(ValueError):
    """Report bytes that are no request, or that could be read as another one."""


def first_of(data: bytes) -> tuple[Heard, bytes] | None:
    """The first request and what follows it; None while it has not come whole.

    Raises:
        Unsound: see there.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None
    first, *lines = head.split(b"\r\n")
    asked = FIRST.match(first)
    if asked is None:
        raise Unsound(f"first line {first!r}")
    headers = [_header(line) for line in lines]
    heard = Heard(asked[1], asked[2], headers, b"")
    lengths, codings = heard.values(b"content-length"), heard.values(b"transfer-encoding")
    if len(lengths) + len(codings) > 1 or codings not in ([], [b"chunked"]):
        raise Unsound(f"framed by {lengths} and {codings}")
    if not all(re.fullmatch(rb"[0-9]{1,18}", length) for length in lengths):
        raise Unsound(f"a length of {lengths}")
    found = _chunks(rest) if codings else _sized(rest, int(lengths[0]) if lengths else 0)
    return found and (heard._replace(body=found[0]), found[1])


def _header(line: bytes) -> tuple[bytes, bytes]:
    pair = LINE.match(line)
    if pair is None:
        raise Unsound(f"header line {line!r}")
    return pair[1], pair[2]


def _sized(data: bytes, length: int) -> tuple[bytes, bytes] | None:
    return (data[:length], data[length:]) if len(data) >= length else None


def _chunks(data: bytes) -> tuple[bytes, bytes] | None:
    body = b""
    while b"\r\n" in data:
        size = CHUNK.match(data)
        if size is None:
            raise Unsound(f"a chunk that begins {data[:20]!r}")
        length = int(size[1], 16)
        start = size.end()
        if len(data) < start + length + 2:
            return None
        if data[start + length : start + length + 2] != b"\r\n":
            raise Unsound("a chunk that is longer than it says, or trailers")
        body, data = body + data[start : start + length], data[start + length + 2 :]
        if not length:
            return body, data
    return None


class StrictUpstream:
    """Answers, and keeps the requests that may not have come, with what is wrong with each."""

    def __init__(self, is_allowed: Callable[[bytes, bytes], bool], key: str) -> None:
        self.is_allowed = is_allowed
        self.key = key.encode()
        # Words that nothing may hold that comes here, such as the agents' keys.
        self.secrets: list[bytes] = []
        self.port = 0
        self.heard = 0
        self.last: Heard | None = None
        self.wrong: list[tuple[str, bytes]] = []
        self.connections: set[asyncio.Transport] = set()

    def take(self, heard: Heard) -> None:
        """Note what is wrong with a request."""
        self.heard += 1
        if heard.target != b"/v1/models":
            self.last = heard
        self.wrong += [(why, b"%b %b %r" % (*heard[:2], heard[2:])) for why in self._faults(heard)]

    def _faults(self, heard: Heard) -> Iterator[str]:
        if not self.is_allowed(heard.method, heard.target):
            yield "a path that is not allowed"
        if heard.values(b"host") != [b"127.0.0.1:%d" % self.port]:
            yield "another host"
        if heard.values(b"authorization") != [b"Bearer " + self.key]:
            yield "not the upstream's key alone"
        for name, _ in heard.headers:
            if name.lower() in NOT_HERE or name.lower().startswith(b"x-pawl-"):
                yield f"a header {name!r}"
        # Not in the body: a request that is longer than it should be takes the next one's key in.
        words = b"\n".join([heard.target, *(value for _, value in heard.headers)])
        if any(secret in words for secret in self.secrets):
            yield "an agent's key"
        # As the requests of `odd` are marked.
        marks = heard.values(b"x-mark")
        if b"nobody" in marks and b"infer" not in marks:
            yield "a request without a key that may"


class _Wire(asyncio.Protocol):
    """One connection: a request is answered before the next one may come."""

    def __init__(self, upstream: StrictUpstream) -> None:
        self._upstream = upstream
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._upstream.connections.add(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._upstream.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        try:
            found = first_of(self._unread)
            if found is None:
                return
            heard, self._unread = found
            self._upstream.take(heard)
            if self._unread:
                raise Unsound("bytes after its end")
        except Unsound as error:
            self._upstream.wrong.append((str(error), self._unread or data))
            self._transport.close()
            return
        self._transport.write(answer(heard))


def answer(heard: Heard) -> bytes:
    """What a model server answers, more or less."""
    kind, body = b"application/json", b'{"done": true}'
    path = heard.target.partition(b"?")[0]
    if path == b"/v1/models":
        listed = [{"id": name, "owned_by": "vllm", "root": "m"} for name in MODELS]
        body = json.dumps({"object": "list", "data": listed}).encode()
    elif path == b"/v1/chat/completions" and heard.method == b"POST":
        asked = _object(heard.body)
        if asked.get("stream") is True:
            kind, body = b"text/event-stream", b"".join(stream_chunks(asked, 1))
            body += b"data: [DONE]\n\n"
        else:
            body = json.dumps(whole_reply(asked, 1)).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    return head if heard.method == b"HEAD" else head + body


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    return {"model": "m"} | (asked if isinstance(asked, dict) else {})


@contextmanager
def strict_upstream(
    is_allowed: Callable[[bytes, bytes], bool], key: str
) -> Iterator[StrictUpstream]:
    """Run one in a thread, until the block ends."""
    upstream, up, leave = StrictUpstream(is_allowed, key), threading.Event(), asyncio.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        server = await loops[0].create_server(lambda: _Wire(upstream), "127.0.0.1", 0)
        upstream.port = server.sockets[0].getsockname()[1]
        up.set()
        await leave.wait()
        server.close()
        for connection in upstream.connections:
            connection.abort()
        # Transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(60)
        yield upstream
    finally:
        loops[0].call_soon_threadsafe(leave.set)
        thread.join()
