"""Say exactly the bytes that a test gives, and note what becomes of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.support.servers.listening import listening

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
