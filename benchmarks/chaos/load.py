"""Load the proxy leanly: kept connections ask one call after another, and note how each ended.

Where `poisoned`, one call in `benchmarks.chaos.poison.EVERY` asks for a reply that is hard to keep.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos.poison import mark_of
from benchmarks.proxy import wire

PATH: Final = "/v1/chat/completions"
PROMPT_CHARS: Final = 300
# After a connection was refused: what listens is being started again.
RETRY_S: Final = 0.02
PATIENCE_S: Final = 60.0
BROKEN: Final = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold a reply that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Outcome:
    """Count what the clients saw."""

    # The ids of calls whose reply's end arrived.
    complete: list[str] = field(default_factory=list)
    # The episode that each of them named.
    episodes: dict[str, str] = field(default_factory=dict)
    # Those that asked for a reply that is hard to keep.
    poisoned: list[str] = field(default_factory=list)
    # When each of them ended (monotonic), and how long it took.
    took: list[tuple[float, float]] = field(default_factory=list)

    def times(self) -> dict[str, tuple[float, float]]:
        """Return when each complete call began and ended, as Unix time in seconds."""
        ahead = time.time() - time.monotonic()
        return {
            call: (at - took + ahead, at + ahead)
            for call, (at, took) in zip(self.complete, self.took, strict=True)
        }

    # Calls that were sent and have no whole reply: when, and why.
    failed: list[tuple[float, str]] = field(default_factory=list)
    # Connections that could not be made: nothing was sent, the client tries again.
    refused: int = 0


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
        self._port = port
        self._poisoned = poisoned
        self._at_once = at_once
        self._pause_s = pause_s
        self._calls_per_episode = calls_per_episode
        self._stopping = False
        self._sent = 0
        self._clients: list[asyncio.Task[None]] = []
        self._wanted = 0
        self._reached = asyncio.Event()
        self.outcome = Outcome()

    def start(self) -> None:
        """Begin."""
        self._clients = [asyncio.create_task(self._client()) for _ in range(self._at_once)]

    async def stop(self) -> None:
        """Let every client finish the call it is at."""
        self._stopping = True
        await asyncio.gather(*self._clients)

    async def reached(self, calls: int) -> None:
        """Wait until so many are complete."""
        self._wanted = calls
        self._reached.clear()
        await self._reached.wait()

    async def _client(self) -> None:
        connection: _Connection | None = None
        while not self._stopping:
            if connection is None:
                try:
                    connection = _Connection(
                        *await asyncio.open_connection("127.0.0.1", self._port)
                    )
                except OSError:
                    self.outcome.refused += 1
                    await asyncio.sleep(RETRY_S)
                    continue
            connection = await self._call(connection)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
        if connection is not None:
            connection.close()

    async def _call(self, connection: "_Connection") -> "_Connection | None":
        """Make one call, and return the connection if it may be used again."""
        self._sent += 1
        number = self._sent
        began = time.monotonic()
        try:
            answer = await asyncio.wait_for(connection.ask(self._request(number)), PATIENCE_S)
            _check(answer, streamed=_streams(number))
        except (*BROKEN, TimeoutError) as error:
            connection.close()
            self.outcome.failed.append((time.monotonic(), f"{type(error).__name__}: {error}"[:200]))
            return None
        self._note(number, answer.headers["x-pawl-call"], began)
        if len(self.outcome.complete) >= self._wanted:
            self._reached.set()
        if answer.headers.get("connection") == "close":
            connection.close()
            return None
        return connection

    def _note(self, number: int, call: str, began: float) -> None:
        now = time.monotonic()
        self.outcome.complete.append(call)
        self.outcome.episodes[call] = self._episode(number)
        if self._mark(number):
            self.outcome.poisoned.append(call)
        self.outcome.took.append((now, now - began))

    def _mark(self, number: int) -> str:
        return mark_of(number) if self._poisoned else ""

    def _episode(self, number: int) -> str:
        return f"chaos-{number // self._calls_per_episode}"

    def _request(self, number: int) -> bytes:
        body = wire.prompt(f"{self._mark(number)}{number} ", PROMPT_CHARS)
        if _streams(number):
            body = f'{body[:-1]},"stream":true}}'
        episode = self._episode(number)
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: pawl\r\nContent-Type: application/json\r\n"
            f"x-pawl-episode: {episode}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()


def _streams(number: int) -> bool:
    return number % 3 == 0


def _check(answer: Answer, *, streamed: bool) -> None:
    """Check that the reply is what was asked for.

    Raises:
        ValueError: it is not.
    """
    end = b"data: [DONE]\n\n" if streamed else b"}"
    if answer.status != 200 or not answer.body.endswith(end):
        raise ValueError(f"status {answer.status}, {answer.body[-100:]!r}")


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> Answer:
        """Send it; read the reply to its end."""
        self._writer.write(request)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
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
        """Let go of it."""
        self._writer.close()


async def fetch(port: int, path: str) -> Answer:
    """Send one GET on a connection of its own.

    Raises:
        OSError, EOFError: nobody is there, or it broke off.
    """
    connection = _Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        asked = f"GET {path} HTTP/1.1\r\nHost: pawl\r\nConnection: close\r\n\r\n"
        return await connection.ask(asked.encode())
    finally:
        connection.close()
