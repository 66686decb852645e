"""Say exactly the bytes that a test gives, and note what becomes of them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from proxy.http.wire import HOP_BY_HOP
from tests.support.servers.listening import listening

CHAT = "/v1/chat/completions"
APIS = {
    CHAT: b'{"model":"m","messages":[{"role":"user","content":"q"}]}',
    "/v1/completions": b'{"model":"m","prompt":"q"}',
    "/v1/responses": b'{"model":"m","input":"q"}',
    "/v1/messages": b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"q"}]}',
}
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"Content-Type: application/json"
# Ends a chunked body.
LAST = b"0\r\n\r\n"

Script = Callable[["RawUpstream", asyncio.StreamWriter], Awaitable[None]]


class RawUpstream:
    """Answer `/v1/models`, and anything else by script; a connection is asked once."""

    def __init__(self, owned_by: str) -> None:
        self.port = 0
        self.owned_by = owned_by
        self.script: Script = says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.asked = asyncio.Event()
        # Whoever asked has closed the connection.
        self.left = asyncio.Event()
        self.said = 0

    @property
    def url(self) -> str:
        """Return the address as `PAWL_UPSTREAM_URL` has it."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            await self._converse(reader, writer)
        finally:
            self.left.set()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET "):
                await self._list_models(writer)
            else:
                self.heads.append(head)
                self.asked.set()
                await self._body(reader, head)
                answering = asyncio.create_task(self._answer(writer))
                # Nothing more comes but the end.
                while await reader.read(1024):
                    pass
                self.left.set()
                await answering

    async def _list_models(self, writer: asyncio.StreamWriter) -> None:
        listed = {"data": [{"id": "m", "owned_by": self.owned_by}]}
        body = json.dumps(listed).encode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await writer.drain()

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> None:
        if b"chunked" in head.lower():
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = await reader.readexactly(size)
        self.bodies.append(body)

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await self.script(self, writer)

    async def say(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send, no faster than it is read."""
        writer.write(data)
        await writer.drain()
        self.said += len(data)


def says(*pieces: bytes, then: str = "close", pause_s: float = 0.0) -> Script:
    """Say these bytes, and then `close`, `reset`, or `hang`."""

    async def script(upstream: RawUpstream, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            await upstream.say(writer, piece)
            await asyncio.sleep(pause_s)
        if then == "reset":
            # What was written arrives first.
            await asyncio.sleep(0.05)
            writer.transport.abort()
        elif then == "close":
            writer.close()

    return script


@asynccontextmanager
async def raw_upstream(owned_by: str = "somebody") -> AsyncIterator[RawUpstream]:
    """Run one, on a free port."""
    upstream = RawUpstream(owned_by)
    async with listening(upstream.serve, limit=2**20) as upstream.port:
        yield upstream


async def raw_ask(port: int, request: bytes) -> bytes:
    """Send it; all that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    received = bytearray()
    with suppress(ConnectionResetError):
        while data := await reader.read(2**20):
            received += data
    writer.close()
    return bytes(received)


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """Write a request whose connection is to be closed."""
    lines = [b"Host: x", b"Content-Type: application/json", b"Connection: close", *headers]
    head = b"POST %b HTTP/1.1\r\n%b\r\n" % (path.encode(), b"\r\n".join(lines))
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def sized(status: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n" % (status, lines, len(body)) + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def parts(reply: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Status line, header lines and body, less what decision 015 and RFC 9110 §7.6.1 except.

    Ours (`x-pawl-`), what belongs to one connection, and how the body is framed.
    """
    head, _, body = reply.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    names = [line.partition(b":")[0].lower() for line in lines]
    if b"transfer-encoding" in names:
        body = unchunked(body)
    excepted = HOP_BY_HOP | {b"content-length"}
    kept = [
        line
        for name, line in zip(names, lines, strict=True)
        if name not in excepted and not name.startswith(b"x-pawl-")
    ]
    return status, kept, body


def unchunked(body: bytes) -> bytes:
    """The content of a chunked body that is whole."""
    content, rest = b"", body
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            assert rest == b"\r\n"
            return content
        content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


async def endless(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
    """A stream without an end."""
    await server.say(writer, EVENTS)
    while True:
        await server.say(writer, chunked(b"data: " + b"x" * 65_528 + b"\n\n"))


async def asleep(port: int, request: bytes) -> socket.socket:
    """Ask, and never read."""
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asking.setblocking(False)
    await asyncio.get_running_loop().sock_connect(asking, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(asking, request)
    return asking
