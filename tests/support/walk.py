"""Walk through the code (`python -m tests.support.walk`): the files of a call and a reward.

A keeper and a worker run in this process. A profile function notes each entry into one of the
project's files, and the file it was entered from (the nearest of the project's on the stack, or
the event loop). What the process does while nobody calls is measured first and left out. A
hand-over is a pair of files, counted once. docs/explanation/walk.md shows the outcome.
"""

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console

from store.connection.engine import make_engine
from store.embedded.server import EmbeddedPostgres
from store.schema.migrate import upgrade
from store.updates.policies import ensure_base
from tests.integration.conftest import Proxy, proxy_with, settings_for
from tests.support.servers.fake_upstream import fake_upstream

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("store", "proxy", "pawl")
IDLE_S: Final = 4.0
STORED_S: Final = 3.0
LOOP: Final = "the event loop"


class Walk:
    """Note the files that were entered, in order, and the hand-overs between them."""

    def __init__(self) -> None:
        self.order: dict[str, None] = {}
        self.pairs: Counter[tuple[str, str]] = Counter()
        self._names: dict[str, str | None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Be the profile function of a thread."""
        if event != "call" or (file := self._name(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and self._name(caller) is None:
            caller = caller.f_back
        before = LOOP if caller is None else self._name(caller) or LOOP
        self.order.setdefault(file)
        if before != file:
            self.pairs[before, file] += 1

    def _name(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if path not in self._names:
            place = Path(path)
            inside = place.is_relative_to(ROOT) and place.relative_to(ROOT).parts[0] in PACKAGES
            self._names[path] = str(place.relative_to(ROOT)) if inside else None
        return self._names[path]


class Walks:
    """Profile all threads, and note what they enter into the walk under way."""

    def __init__(self) -> None:
        self.current = Walk()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, value: Any) -> None:
        self.current.note(frame, event, value)

    def next(self) -> Walk:
        """Begin another walk, and return the one that ends."""
        ended, self.current = self.current, Walk()
        return ended


async def call_and_reward(proxy: Proxy) -> None:
    """Make a streamed call of an episode and its reward, and wait until both are stored.

    Whoever looked meanwhile whether they are would be among those who walk.
    """
    messages = [{"role": "user", "content": "q"}]
    body = {"model": "m", "stream": True, "messages": messages}
    url = f"{proxy.url}/v1/chat/completions"
    headers = {"x-pawl-episode": "e"}
    async with proxy.session.post(url, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
    status, answer = await proxy.feedback({"episode": "e", "value": 1.0})
    assert status in {200, 202}, answer
    await asyncio.sleep(STORED_S)


async def walk(url: str, folder: Path) -> tuple[Walk, Walk]:
    """Return what happens while nobody calls, and what while one call and one reward come in."""
    engine = make_engine(url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    walks = Walks()
    async with AsyncExitStack() as exits:
        upstream = await exits.enter_async_context(fake_upstream())
        settings = settings_for(url, upstream.url, folder)
        proxy = await exits.enter_async_context(proxy_with(settings, engine))
        # What is done once, such as the list of the upstream's models, is not the call's.
        await call_and_reward(proxy)
        walks.next()
        await asyncio.sleep(IDLE_S)
        idle = walks.next()
        await call_and_reward(proxy)
        busy = walks.next()
    sys.setprofile(None)
    await engine.dispose()
    return idle, busy


async def main() -> None:
    """Walk, and print the files in the order of their first entry, each with who entered it."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder) / "pg")
        await asyncio.to_thread(server.ensure_running)
        try:
            await upgrade(server.url)
            idle, busy = await walk(server.url, Path(folder))
        finally:
            await asyncio.to_thread(server.stop)
    pairs = [pair for pair in busy.pairs if pair not in idle.pairs]
    files = [file for file in busy.order if any(file in pair for pair in pairs)]
    console = Console(width=200, highlight=False)
    for file in files:
        callers = ", ".join(a for a, b in pairs if b == file) or "(already there)"
        console.print(f"{file:<40} from {callers}")
    console.print(f"{len(files)} files, {len(pairs)} hand-overs")


if __name__ == "__main__":
    asyncio.run(main())
