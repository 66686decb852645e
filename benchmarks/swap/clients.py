"""Stream chat completions of named episodes, so many at once, and note each chunk's time."""

import asyncio
import json
import time
from itertools import count
from typing import Any, Final
from zlib import crc32

import aiohttp

from benchmarks.swap.records import Call, Gap

CALLS: Final = 3
# With as many tokens in each reply all clients would go on in step: their calls begin and end
# together, and a version that serves for a few seconds would meet no new episode.
FEWEST_TOKENS: Final = 16
MOST_TOKENS: Final = 32
# The engine may compile for minutes before its first reply.
PATIENCE_S: Final = 600.0
LOOK_AGAIN_S: Final = 1.0
OK: Final = 200
DONE: Final = b"data: [DONE]"
DATA: Final = b"data: {"
QUESTIONS: Final = ("Where does the river end?", "And where does it begin?", "Who has seen both?")


def tokens_of(episode: str, turn: int) -> int:
    """Return how many tokens a call of an episode is to sample."""
    span = MOST_TOKENS - FEWEST_TOKENS + 1
    return FEWEST_TOKENS + crc32(f"{episode} {turn}".encode()) % span


class NotWhole(Exception):
    """Report that a reply is not what was asked for."""


class Reply:
    """Read the pieces of one streamed reply; its first text came at `first`."""

    def __init__(self) -> None:
        self.text = ""
        self.first: float | None = None
        self.tokens: int | None = None
        self.is_done = False
        self._rest = b""

    def feed(self, piece: bytes) -> bool:
        """Read a piece; return whether it had a chunk.

        Raises:
            NotWhole: the server reports an error in the stream.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        chunks = [line for line in lines if line.startswith(DATA)]
        for line in chunks:
            self._read(json.loads(line.removeprefix(b"data: ")))
        self.is_done = self.is_done or any(line.startswith(DONE) for line in lines)
        return bool(chunks)

    def _read(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise NotWhole(f"an error in the stream: {chunk['error']}")
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
        usage = chunk.get("usage")
        self.tokens = usage["completion_tokens"] if usage else self.tokens

    def check(self, tokens: int) -> None:
        """Check that all of it came.

        Raises:
            NotWhole: it has no end, or not so many tokens.
        """
        if not self.is_done or self.tokens != tokens:
            raise NotWhole(f"{self.tokens} of {tokens} tokens, [DONE]: {self.is_done}")


class Clients:
    """Run so many clients, each of which has one call under way at any time.

    Attributes:
        calls: those that have ended.
        gaps: those between two chunks of one reply.
    """

    def __init__(self, base_url: str, model: str, streams: int) -> None:
        self.calls: list[Call] = []
        self.gaps: list[Gap] = []
        self._url = f"{base_url}/chat/completions"
        self._model = model
        self._streams = streams
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession

    @property
    def failed(self) -> int:
        """Return how many calls were not answered as asked."""
        return sum(call.why is not None for call in self.calls)

    async def __aenter__(self) -> "Clients":
        """Open the connections' pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
        )
        return self

    async def until_served(self, version: str) -> None:
        """Ask until new episodes get `version`; these calls are not among `calls`.

        An episode that began before the policy did has no version to keep.
        """
        for number in count():
            question = [{"role": "user", "content": QUESTIONS[0]}]
            call, _ = await self._call(f"swap-first-{number}", question)
            if call.version == version:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def start(self) -> None:
        """Let every client begin."""
        self._tasks = [asyncio.create_task(self._client(own)) for own in range(self._streams)]

    async def stop(self) -> None:
        """Let every client finish the episode that it is at."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def __aexit__(self, *_: object) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _client(self, own: int) -> None:
        for number in count():
            if self._stopping:
                return
            await self._episode(f"swap-{own}-{number}")

    async def _episode(self, episode: str) -> None:
        """Have one conversation, or as much of it as is answered."""
        messages: list[dict[str, str]] = []
        for question in QUESTIONS[:CALLS]:
            messages.append({"role": "user", "content": question})
            call, reply = await self._call(episode, messages)
            self.calls.append(call)
            if call.why is not None:
                await asyncio.sleep(LOOK_AGAIN_S)
                return
            messages.append({"role": "assistant", "content": reply.text})

    async def _call(self, episode: str, messages: list[dict[str, str]]) -> tuple[Call, Reply]:
        began, why, reply = time.monotonic(), None, Reply()
        tokens = tokens_of(episode, len(messages))
        told: dict[str, str] = {}
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._session.post(
                self._url, json=body, headers={"x-pawl-episode": episode}
            ) as response:
                told = {
                    "id": response.headers.get("x-pawl-call", ""),
                    "version": response.headers.get("x-pawl-policy", ""),
                }
                if response.status != OK:
                    raise NotWhole(f"status {response.status}: {(await response.text())[:300]}")
                await self._read(response, reply)
            reply.check(tokens)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, NotWhole) as error:
            why = f"{type(error).__name__}: {error}"
        ended, first = time.monotonic(), reply.first
        return Call(episode=episode, began=began, ended=ended, first=first, why=why, **told), reply

    async def _read(self, response: aiohttp.ClientResponse, reply: Reply) -> None:
        """Read a reply to its end. Pieces that come at once count as one chunk."""
        before: float | None = None
        async for piece in response.content.iter_any():
            now = time.monotonic()
            if not reply.feed(piece):
                continue
            if before is not None:
                self.gaps.append(Gap(at=now, seconds=now - before))
            before = now
            if reply.first is None and reply.text:
                reply.first = now
