"""Ask a real proxy for versions by their names, whatever happens to the model server.

Their calls are of the evaluation split: stored, and never trained.
"""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import aiohttp

from benchmarks.chaos.trainer.place import Place
from benchmarks.stack import free_port

AT_ONCE: Final = 2
PAUSE_S: Final = 0.1
# All proxies know a version so long after it was promoted.
KNOWN_S: Final = 10.0
PATIENCE_S: Final = 60.0
OK: Final = 200
UP_S: Final = 60.0
PROMPT: Final = [5, 6, 7, 8]


class Answered(NamedTuple):
    """Record how a call ended; `status` is 0 where there was no reply."""

    began: float
    ended: float
    name: str
    status: int
    said: str


class Proxy:
    """Run `pawl proxy` before a run's model server; it is never killed."""

    def __init__(self, place: Place, upstream_port: int) -> None:
        self.port = free_port()
        self._log = place.folder / "proxy.log"
        of_policies = {} if place.policies is None else {"PAWL_POLICIES": str(place.policies)}
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PAWL_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pawl.cli", "proxy", "--workers", "1"],
                env=kept
                | of_policies
                | {
                    "DATABASE_URL": place.database_url,
                    "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
                    "PAWL_LISTEN": f"127.0.0.1:{self.port}",
                    "PAWL_ADMIN_LISTEN": f"127.0.0.1:{free_port()}",
                    "PAWL_SPOOL_DIR": str(place.folder / "spool"),
                },
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """Send SIGTERM: what is recorded is stored first."""
        self._process.terminate()
        try:
            self._process.wait(UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Callers:
    """Call so many at once, each of which asks for one version after another, chosen at random."""

    def __init__(self, port: int, names: Callable[[], list[str]], dice: random.Random) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._names, self._dice = names, dice
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))
        self.answered: list[Answered] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Let each finish the call it is at."""
        self._stopping.set()
        self._thread.join()

    def wait_until_served(self, calls: int) -> None:
        """Wait until so many more calls were answered well, a minute at most."""
        deadline, before = time.monotonic() + PATIENCE_S, self._served()
        while self._served() < before + calls and time.monotonic() < deadline:
            time.sleep(PAUSE_S)

    def _served(self) -> int:
        return sum(one.status == OK for one in self.answered)

    async def _work(self) -> None:
        limit = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=limit) as session:
            await asyncio.gather(*(self._caller(session) for _ in range(AT_ONCE)))

    async def _caller(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            names = self._names()
            if names:
                await self._call(session, self._dice.choice(names))
            await asyncio.sleep(PAUSE_S)

    async def _call(self, session: aiohttp.ClientSession, name: str) -> None:
        began = time.monotonic()
        body = {"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 1.0}
        try:
            async with session.post(
                self._url, json=body, headers={"x-pawl-split": "eval"}
            ) as reply:
                status, said = reply.status, (await reply.text())[:300]
        except (aiohttp.ClientError, TimeoutError) as error:
            status, said = 0, f"{type(error).__name__}: {error}"[:300]
        self.answered.append(Answered(began, time.monotonic(), name, status, said))


@contextmanager
def calling(
    place: Place, upstream_port: int, names: Callable[[float], list[str]], seed: int
) -> Iterator[Callers]:
    """Have callers ask a proxy for what has been servable for a while, until the block ends."""
    proxy = Proxy(place, upstream_port)
    callers = Callers(proxy.port, lambda: names(KNOWN_S), random.Random(seed))
    try:
        callers.start()
        yield callers
    finally:
        callers.stop()
        proxy.stop()


def by_status(answered: list[Answered]) -> Mapping[int, int]:
    """Return how many calls ended with each status."""
    found: dict[int, int] = {}
    for one in answered:
        found[one.status] = found.get(one.status, 0) + 1
    return found
