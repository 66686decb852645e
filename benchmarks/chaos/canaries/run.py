"""Kill so many times while a version is tried, and report what came of it.

A proxy, a trainer with a gate, a steward and a model server that computes are up; clients run
episodes and score them. A process is killed (`kill -9`) at a random moment, and started again after
another one. Only kills while a canary has a share of the episodes count.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.chaos.beside.model_server import Computing
from benchmarks.chaos.canaries.clients import Clients
from benchmarks.chaos.canaries.ledger import is_tried, report
from benchmarks.chaos.canaries.recipe import RECIPE
from benchmarks.chaos.scrape import Scrapes, drained
from benchmarks.chaos.stand import NotReady, Stand
from benchmarks.chaos.stand import Part as ProxyPart
from benchmarks.chaos.trainer.cast import BASE
from benchmarks.chaos.trainer.forks import Zygote, zygote
from benchmarks.chaos.trainer.place import Place
from benchmarks.stack import free_port
from store.connection.engine import make_engine

# Each as often as its place in the list.
VICTIMS: Final = (
    *("steward", "steward", "trainer", "trainer", "model server"),
    *("worker", "ingester", "supervisor"),
)
OF_THE_PROXY: Final[tuple[ProxyPart, ...]] = ("worker", "ingester", "supervisor")
QUIET_S: Final = (0.2, 1.5)
AWAY_S: Final = (0.0, 0.5)
LOOK_S: Final = 0.1
# A trainer begins with an adapter on trial, and then waits for two groups.
TRIED_WITHIN_S: Final = 300.0
DRAIN_S: Final = 120.0


class NothingTried(Exception):
    """Report that no version became a canary for long; the message ends with the trainer's log."""


@dataclass(slots=True)
class Happened:
    """Note what was done, and what ended otherwise."""

    killed: Counter[str] = field(default_factory=Counter)
    by_themselves: list[str] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)


class Child:
    """Run `pawl steward` or `pawl trainer`, which may be killed."""

    def __init__(self, forks: Zygote, role: str, log: Path, env: dict[str, str]) -> None:
        self.role = role
        self._forks, self._log, self._env = forks, log, env
        self._pid = 0

    def start(self) -> None:
        """Start it."""
        self._pid = self._forks.start(self.role, self._log, self._env)

    def end(self, by: signal.Signals) -> int | None:
        """Send a signal, and return how it ended."""
        return self._forks.end(self._pid, by)


class Parts:
    """Hold all that can be killed."""

    def __init__(self, stand: Stand, server: Computing, children: list[Child]) -> None:
        self.stand, self.server = stand, server
        self.children = {child.role: child for child in children}
        self.happened = Happened()

    async def kill(self, victim: str, away_s: float, which: int) -> None:
        """Kill one, and start it again after some seconds; return when the proxy is ready.

        Raises:
            NotReady: it is not, after a minute.
        """
        self.happened.killed[victim] += 1
        if victim in OF_THE_PROXY:
            part = next(part for part in OF_THE_PROXY if part == victim)
            await self.stand.kill(part, which)
        elif victim == "model server":
            await asyncio.to_thread(self.server.kill)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(self.server.start)
        else:
            child = self.children[victim]
            self._note(child, await asyncio.to_thread(child.end, signal.SIGKILL), -signal.SIGKILL)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(child.start)

    def stop(self) -> None:
        """Ask trainer and steward to end, and then kill the server."""
        for child in self.children.values():
            self._note(child, child.end(signal.SIGTERM), 0)
        self.server.kill()

    def _note(self, child: Child, status: int | None, wanted: int) -> None:
        if status != wanted:
            self.happened.by_themselves.append(f"{child.role}: status {status}, not {wanted}")


def canary_kills(folder: Path, kills: int, seed: int) -> dict[str, dict[str, Any]]:
    """Kill so many times; what became of the versions, the calls and the rewards.

    Raises:
        NothingTried: see there.
        NotUp: the model server did not come up.
    """
    # With it comes torch, which the other targets of `benchmarks.chaos` do without.
    from benchmarks.chaos.trainer.stage import write_model

    model = folder / "model"
    write_model(model)
    (folder / "recipe.toml").write_text(RECIPE)
    with zygote(folder / "zygote.log") as forks:
        server = Computing(forks, folder, model)
        server.start()
        stand = Stand(folder, server.port, workers=2)
        place = Place(folder, stand.url, (BASE,), model, folder / "recipe.toml", None, 0)
        children = [
            Child(forks, "trainer", place.log, place.env(server.port)),
            Child(forks, "steward", folder / "steward.log", _of_steward(stand.url, server.port)),
        ]
        try:
            return {"canaries": asyncio.run(_run(Parts(stand, server, children), kills, seed))}
        finally:
            stand.postgres.stop()


def _of_steward(url: str, upstream_port: int) -> dict[str, str]:
    return {
        "DATABASE_URL": url,
        "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "PAWL_STEWARD_LISTEN": f"127.0.0.1:{free_port()}",
    }


async def _run(parts: Parts, kills: int, seed: int) -> dict[str, Any]:
    stand, happened, began = parts.stand, parts.happened, time.monotonic()
    await stand.ready()
    for child in parts.children.values():
        child.start()
    clients = Clients(stand.port, BASE, seed)
    clients.start()
    engine = make_engine(stand.url)
    try:
        await _kill_all(parts, clients, engine, kills, random.Random(seed))
    except NotReady as error:
        happened.stalled.append(str(error))
    finally:
        await engine.dispose()
        await clients.stop()
    await asyncio.to_thread(parts.stop)
    drain_s = await drained(stand.admin, Scrapes(), within_s=DRAIN_S)
    await asyncio.to_thread(stand.stop)
    seen = clients.seen
    return {
        "seconds": round(time.monotonic() - began),
        "killed": dict(happened.killed),
        "statuses": dict(seen.statuses),
        "drain_s": drain_s,
        **await report(stand.url, BASE, seen.answered, seen.scored),
        "by_themselves": happened.by_themselves,
        "ended_by_itself": stand.ended_by_itself,
        "stalled": happened.stalled,
    }


async def _kill_all(
    parts: Parts, clients: Clients, engine: AsyncEngine, kills: int, dice: random.Random
) -> None:
    columns = (TextColumn("kills while a version is tried"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        for _ in progress.track(range(kills)):
            await asyncio.sleep(dice.uniform(*QUIET_S))
            clients.check()
            await _until_tried(parts, engine)
            await parts.kill(dice.choice(VICTIMS), dice.uniform(*AWAY_S), dice.randrange(2))


async def _until_tried(parts: Parts, engine: AsyncEngine) -> None:
    """Wait until a version is a canary.

    Raises:
        NothingTried: none was for `TRIED_WITHIN_S`.
    """
    deadline = time.monotonic() + TRIED_WITHIN_S
    while True:
        async with engine.connect() as connection:
            if await is_tried(connection, BASE):
                return
        if time.monotonic() > deadline:
            log = parts.stand.log.with_name(f"{BASE}.log")
            raise NothingTried(log.read_text(errors="replace")[-3000:])
        await asyncio.sleep(LOOK_S)
