"""Run episodes through the proxy, and POST what each was worth until that is taken."""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import aiohttp

from benchmarks.chaos.canaries.recipe import GROUP, Worth

AT_ONCE: Final = 6
PAUSE_S: Final = 0.02
RETRY_S: Final = 0.1
# Longer than a call waits for a version that is not loaded.
PATIENCE_S: Final = 30.0
OK: Final = 200
PROMPT: Final = (5, 6, 7, 8)
BROKEN: Final = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True)
class Seen:
    """Note what the clients saw."""

    # The ids of calls whose reply came whole.
    answered: list[str] = field(default_factory=list)
    # The episodes whose reward was taken.
    scored: list[str] = field(default_factory=list)
    # Calls and statements by their status; 0: there was no answer.
    statuses: Counter[int] = field(default_factory=Counter)


class Clients:
    """Run so many episodes at once, of one call or two."""

    def __init__(self, port: int, model: str, seed: int) -> None:
        self.seen = Seen()
        self._url = f"http://127.0.0.1:{port}"
        self._model = model
        self._worth = Worth(seed)
        self._numbers = count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._client()) for _ in range(AT_ONCE)]

    async def stop(self) -> None:
        """Let every client end its episode, and have its reward taken."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raise what ended a client, if anything did."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _client(self) -> None:
        limit = aiohttp.ClientTimeout(total=PATIENCE_S)
        # No connection is kept: whoever is started again gets new ones at once.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            while not self._stopping:
                await self._episode(session, next(self._numbers))
                await asyncio.sleep(PAUSE_S)

    async def _episode(self, session: aiohttp.ClientSession, number: int) -> None:
        """Make the calls of an episode; one that was answered to its end gets its reward."""
        episode = f"canaries-{number}"
        headers = {"x-pawl-episode": episode, "x-pawl-task": f"task-{number // GROUP}"}
        version = 0
        for _ in range(1 + number % 2):
            answered = await self._call(session, headers)
            if answered is None:
                await asyncio.sleep(RETRY_S)
                return
            version = answered
        await self._score(session, episode, self._worth.of(version))

    async def _call(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int | None:
        """Return the version that answered a call, or None if none did.

        Until the proxy knows of the policy, the base model answers without one.
        """
        body = {"model": self._model, "prompt": PROMPT, "max_tokens": 2, "temperature": 1.0}
        status, told = await self._post(session, "/v1/completions", body, headers)
        if status != OK:
            return None
        self.seen.answered.append(told["x-pawl-call"])
        named = told.get("x-pawl-policy")
        return None if named is None else int(named.rpartition("@")[2])

    async def _score(self, session: aiohttp.ClientSession, episode: str, value: float) -> None:
        """Repeat a statement under its key until it was taken."""
        stated = {"episode": episode, "value": value}
        headers = {"Idempotency-Key": os.urandom(8).hex()}
        while True:
            status, _ = await self._post(session, "/feedback", stated, headers)
            if OK <= status < OK + 100:
                self.seen.scored.append(episode)
                return
            await asyncio.sleep(RETRY_S)

    async def _post(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> tuple[int, Mapping[str, str]]:
        """Return status and headers of a reply that came whole; the status is 0 if none did."""
        status, told = 0, dict[str, str]()
        with suppress(*BROKEN):
            async with session.post(f"{self._url}{path}", json=body, headers=headers) as reply:
                await reply.read()
                status, told = reply.status, dict(reply.headers)
        self.seen.statuses[status] += 1
        return status, {name.lower(): value for name, value in told.items()}
