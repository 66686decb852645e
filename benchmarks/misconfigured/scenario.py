"""Follow one misconfiguration from its injection to the next version that serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.chaos.trainer.cast import BASE
from benchmarks.misconfigured.episodes import GROUPS, UPDATE, Agents
from benchmarks.misconfigured.faults import Fault, Moment, inject, packaged_recipe, repair
from benchmarks.misconfigured.server import ModelServer
from benchmarks.misconfigured.trainer import Trainer
from store.connection.engine import make_engine
from store.schema.migrate import upgrade
from store.version_states import ensure_base

# More than two updates while the fault lasts: a third could be spent.
WRONG_GROUPS: Final = 2 * GROUPS + 2
KNOWN_WITHIN_S: Final = 120.0
# A fault that is known lasts so long nevertheless: longer than from one trial to the next.
LASTS_S: Final = 25.0
LEARNS_WITHIN_S: Final = 120.0
POLL_S: Final = 0.1
# Agents that go on working under a fault sample another update's episodes this often.
BETWEEN_S: Final = 2.0
# The bars.
MOST_UPDATES: Final = 2
MOST_S: Final = 60.0


class Outcome(NamedTuple):
    """Record what a misconfiguration cost; `learns_after_s` is None where nothing was learned."""

    fault: str
    moment: Moment
    known_after_s: float | None
    told: str
    status: int | None
    spent: int
    learns_after_s: float | None
    remedy: str

    @property
    def missed(self) -> list[str]:
        """Return the bars that it misses."""
        most = 0 if self.moment == "at the start" else MOST_UPDATES * UPDATE
        found = []
        if self.spent > most:
            found.append(f"{self.spent} episodes spent, {most} allowed")
        if self.known_after_s is None or self.remedy not in self.told:
            found.append(f"did not say {self.remedy}")
        if self.learns_after_s is None or self.learns_after_s > MOST_S:
            found.append("did not learn again in time")
        return found


class Scenario:
    """Keep a database, a model server and a trainer of their own for one misconfiguration."""

    def __init__(self, folder: Path, url: str, right: Path, wrong: Path) -> None:
        folder.mkdir()
        self._url = url
        self._server = ModelServer(right, wrong)
        self._trainer = Trainer(folder, url, self._server.url, right)

    async def run(self, fault: Fault, moment: Moment) -> Outcome:
        """Run it to its end."""
        await upgrade(self._url)
        engine = make_engine(self._url)
        self._trainer.recipe.write_text(packaged_recipe())
        try:
            async with engine.begin() as connection:
                await ensure_base(connection, BASE, BASE)
            await self._server.start()
            agents = Agents(engine, self._server.url)
            return await self._suffer(fault, moment, agents)
        finally:
            await self._trainer.stop()
            await self._server.stop()
            await engine.dispose()

    async def _suffer(self, fault: Fault, moment: Moment, agents: Agents) -> Outcome:
        trainer = self._trainer
        await agents.work(GROUPS, 0)
        if moment == "while it runs":
            await trainer.start()
            await _until(self._serves_more_than(0), KNOWN_WITHIN_S)
        version, before = await trainer.serving(), await trainer.spent()
        if fault.takes_server_away:
            # Nobody samples once it is away.
            await agents.work(WRONG_GROUPS, version)
        await inject(fault, moment, self._server, trainer)
        if moment == "at the start":
            await trainer.start()
        elif not fault.takes_server_away:
            await agents.work(WRONG_GROUPS, version)
        known_after_s = await _until(self._is_known, KNOWN_WITHIN_S)
        if trainer.ended is None:
            await self._go_on(fault, agents, version)
        told, status, lost = trainer.told(), trainer.ended, await trainer.serving()
        learns_after_s = await self._repaired(fault, moment, agents, lost)
        spent = await trainer.spent() - before
        return Outcome(
            *(fault.name, moment, known_after_s, told, status, spent, learns_after_s, fault.remedy)
        )

    async def _go_on(self, fault: Fault, agents: Agents, version: int) -> None:
        """Let the fault last, while agents go on working if there is a server."""
        if fault.takes_server_away:
            await asyncio.sleep(LASTS_S)
            return
        working = asyncio.create_task(_work(agents, version))
        await asyncio.sleep(LASTS_S)
        await _end(working)

    async def _repaired(
        self, fault: Fault, moment: Moment, agents: Agents, version: int
    ) -> float | None:
        """Return the seconds from the repair, where agents go on working, to the next version."""
        began = time.monotonic()
        await repair(fault, moment, self._server, self._trainer)
        working = asyncio.create_task(_work(agents, version))
        learned = await _until(self._serves_more_than(version), LEARNS_WITHIN_S)
        await _end(working)
        return None if learned is None else time.monotonic() - began

    async def _is_known(self) -> bool:
        """Return whether the trainer does nothing for the fault, and has said why."""
        trainer = self._trainer
        is_away = trainer.says("trainer_waits")
        return trainer.ended is not None or await trainer.is_held() or is_away

    def _serves_more_than(self, version: int) -> Callable[[], Awaitable[bool]]:
        async def look() -> bool:
            return await self._trainer.serving() > version

        return look


async def _work(agents: Agents, version: int) -> None:
    """Let agents work for ever, an update's episodes at a time."""
    while True:
        await agents.work(GROUPS, version)
        await asyncio.sleep(BETWEEN_S)


async def _end(working: asyncio.Task[None]) -> None:
    """Send the agents home.

    Raises:
        Exception: they could not work, which they say by the exception.
    """
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working


async def _until(check: Callable[[], Awaitable[bool]], within_s: float) -> float | None:
    """Wait until `check` is true; the seconds that took, None if it is not in time."""
    began = time.monotonic()
    while not await check():
        if time.monotonic() - began > within_s:
            return None
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began
