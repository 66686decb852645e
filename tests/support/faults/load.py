"""Load the proxy leanly: kept connections ask one call after another, and note how each ended.

Where `poisoned`, one call in `EVERY` asks for a reply that is hard to keep.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from benchmarks import wire

EVERY: Final = 200
PROMPT_CHARS: Final = 300
CHUNKS: Final = 5
# After a connection was refused: what listens is being started again.
RETRY_S: Final = 0.02
PATIENCE_S: Final = 60.0
BROKEN: Final = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)


class Answer(NamedTuple):
    """Hold a reply that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Outcome:
    """Note what the clients saw.

    Attributes:
        complete: the ids of calls whose reply's end arrived.
        episodes: the episode that each of them named.
        poisoned: how many of them asked for a reply that is hard to keep.
        took: when each of them ended (monotonic), and how long it took.
        failed: calls that were sent and have no whole reply: when, and why.
        refused: connections that could not be made; nothing was sent, the client tries again.
    """

    complete: list[str] = field(default_factory=list)
    episodes: dict[str, str] = field(default_factory=dict)
    poisoned: int = 0
    took: list[tuple[float, float]] = field(default_factory=list)
    failed: list[tuple[float, str]] = field(default_factory=list)
    refused: int = 0

    def times(self) -> dict[str, tuple[float, float]]:
        """Return when each complete call began and ended, as Unix time in seconds."""
        ahead = time.time() - time.monotonic()
        return {
            call: (at - took + ahead, at + ahead)
            for call, (at, took) in zip(self.complete, self.took, strict=True)
        }


class Load:
    """Run so many clients at once; every third call is a stream."""

    def __init__(
        self,
        port: int,
        *,
        at_once: int,
        pause_s: float,
        calls_per_episode: int,
        poisoned: bool = False,
    ) -> None:
        self.outcome = Outcome()
        self._port, self._at_once, self._pause_s = port, at_once, pause_s
        self._calls_per_episode, self._poisoned = calls_per_episode, poisoned
        self._stopping = False
        self._sent = self._wanted = 0
        self._reached = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._clients = [asyncio.create_task(self._client()) for _ in range(self._at_once)]

    async def stop(self) -> None:
        """Let every client finish the call it is at."""
        self._stopping = True
        await asyncio.gather(*self._clients)

    async def reached(self, calls: int) -> None:
        """Wait until `calls` calls are complete in all."""
        self._wanted = calls
        self._reached.clear()
        await self._reached.wait()

    async def _client(self) -> None:
        connection: Connection | None = None
        while not self._stopping:
            if connection is None:
                try:
                    connection = await Connection.to(self._port)
                except OSError:
                    self.outcome.refused += 1
                    await asyncio.sleep(RETRY_S)
                    continue
            if not await self._call(connection):
                connection.close()
                connection = None
            await asyncio.sleep(self._pause_s)
        if connection is not None:
            connection.close()

    async def _call(self, connection: "Connection") -> bool:
        """Make one call, and return whether the connection may be used again."""
        self._sent += 1
        number, began, outcome = self._sent, time.monotonic(), self.outcome
        is_streamed, is_poisoned = number % 3 == 0, self._poisoned and number % EVERY == 0
        kinds = tuple(wire.POISONED)
        mark = f"{wire.POISON}{kinds[number // EVERY % len(kinds)]} " if is_poisoned else ""
        body = wire.prompt(f"{mark}{number} ", PROMPT_CHARS)
        body = wire.as_stream(body, CHUNKS) if is_streamed else body
        episode = f"chaos-{number // self._calls_per_episode}"
        request = wire.post("pawl", wire.CHAT, body, {"x-pawl-episode": episode})
        try:
            answer = await asyncio.wait_for(connection.ask(request), PATIENCE_S)
            end = b"data: [DONE]\n\n" if is_streamed else b"}"
            if answer.status != 200 or not answer.body.endswith(end):
                raise ValueError(f"status {answer.status}, {answer.body[-100:]!r}")
        except (*BROKEN, TimeoutError) as error:
            outcome.failed.append((time.monotonic(), f"{type(error).__name__}: {error}"[:200]))
            return False
        now, call = time.monotonic(), answer.headers["x-pawl-call"]
        outcome.complete.append(call)
        outcome.episodes[call] = episode
        outcome.poisoned += is_poisoned
        outcome.took.append((now, now - began))
        if len(outcome.complete) >= self._wanted:
            self._reached.set()
        return answer.headers.get("connection") != "close"


class Connection:
    """Ask for one reply after another on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes) -> Answer:
        """Send it; read the reply to its end."""
        self._writer.write(request)
        lines = (await self._reader.readuntil(wire.HEAD_END)).decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines[1:] if line]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return Answer(int(lines[0].split(" ")[1]), headers, await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        pieces = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            pieces.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(pieces)

    def close(self) -> None:
        self._writer.close()


async def fetch(port: int, path: str) -> Answer:
    """Send one GET on a connection of its own.

    Raises:
        OSError, EOFError: nobody is there, or it broke off.
    """
    connection = await Connection.to(port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: pawl\r\nConnection: close\r\n\r\n"
        return await connection.ask(request.encode())
    finally:
        connection.close()
