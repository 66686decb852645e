"""Walk through the code (`python -m tests.support.walk`): the files of a call and a reward.

An ingester and a worker run in this process. A profile function notes each entry into one of the
project's files, and the file it was entered from (the nearest of the project's on the stack, or
the event loop). What the process does while nobody calls is measured first and left out, function
by function: what a timer enters by one function, a call may enter by another. A hand-over is a pair
of files, counted once.
"""

import asyncio
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.schema.migrate import upgrade
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, eventually, proxy_with, settings_for
from tests.support.servers.fake_upstream import fake_upstream

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("store", "proxy", "pawl")
# Longer than any pause between two looks of the ingester's but those of ten minutes: some are of
# ten seconds, and one is twenty times as long as its look (`proxy.ingester.ingester`).
IDLE_S: Final = 30.0
# For so long the ingester is given to count what it has settled.
COUNTED_S: Final = 2.0
LOOP: Final = "the event loop"


class Walk:
    """Note the files that were entered, in order, and the hand-overs between them."""

    def __init__(self) -> None:
        self.order: dict[str, None] = {}
        self.pairs: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
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
            self.pairs[before, file].add(frame.f_code.co_qualname)

    def pairs_beside(self, idle: "Walk") -> list[tuple[str, str]]:
        """Return the pairs with a function that was not entered from there while nobody called."""
        return [pair for pair, entered in self.pairs.items() if entered - idle.pairs[pair]]

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
    """Make a streamed call of an episode and its reward."""
    messages = [{"role": "user", "content": "q"}]
    body = {"model": "m", "stream": True, "messages": messages}
    url = f"{proxy.url}/v1/chat/completions"
    headers = {"x-pawl-episode": "e"}
    async with proxy.session.post(url, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
    status, answer = await proxy.feedback({"episode": "e", "value": 1.0})
    assert status in {200, 202}, answer


async def settled(engine: AsyncEngine, rewards: int) -> None:
    """Wait until so many rewards have found their episode.

    None of the project's code looks whether they have: it would be among those who walk.
    """

    async def look() -> bool:
        async with engine.connect() as connection:
            found = await connection.execute(text("SELECT count(episode_id) FROM feedback"))
            return bool(found.scalar_one() == rewards)

    await eventually(look)


async def walk(walks: Walks, url: str, folder: Path) -> tuple[Walk, Walk]:
    """Return what happens while nobody calls, and what while one call and one reward come in."""
    engine = make_engine(url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    async with AsyncExitStack() as exits:
        upstream = await exits.enter_async_context(fake_upstream())
        settings = settings_for(url, upstream.url, folder)
        proxy = await exits.enter_async_context(proxy_with(settings, engine))
        # What is done once, such as the list of the upstream's models, is not the call's.
        await call_and_reward(proxy)
        await settled(engine, 1)
        await asyncio.sleep(COUNTED_S)
        walks.next()
        await asyncio.sleep(IDLE_S)
        idle = walks.next()
        # Nor is the segment that the first call after a pause begins.
        await call_and_reward(proxy)
        await settled(engine, 2)
        walks.next()
        await call_and_reward(proxy)
        await settled(engine, 3)
        await asyncio.sleep(COUNTED_S)
        busy = walks.next()
    sys.setprofile(None)
    await engine.dispose()
    return idle, busy


async def main() -> None:
    """Walk, and print the files in the order of their first entry, each with who entered it."""
    # Before any thread begins, or it would work unseen.
    walks = Walks()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder) / "pg")
        await asyncio.to_thread(server.ensure_running)
        try:
            await upgrade(server.url)
            idle, busy = await walk(walks, server.url, Path(folder))
        finally:
            await asyncio.to_thread(server.stop)
    pairs = busy.pairs_beside(idle)
    files = [file for file in busy.order if any(file in pair for pair in pairs)]
    console = Console(width=200, highlight=False)
    for file in files:
        callers = ", ".join(a for a, b in pairs if b == file) or "(already there)"
        console.print(f"{file:<40} from {callers}", soft_wrap=True)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    console.print(f"{len(files)} files of {lines} lines, {len(pairs)} hand-overs")


if __name__ == "__main__":
    asyncio.run(main())
