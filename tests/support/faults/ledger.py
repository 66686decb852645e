"""Read what the proxy counts, and what PostgreSQL has of the calls whose end the clients saw."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

import asyncpg

from tests.support.faults.load import BROKEN, fetch

RECORDED: Final = "pawl_records_total"
SPOOLED: Final = "pawl_records_spooled"
DROPPED: Final = "pawl_records_dropped_total"
OUTCOMES: Final = (
    "pawl_records_stored_total",
    SPOOLED,
    "pawl_records_dead_lettered_total",
    DROPPED,
    "pawl_records_deleted_total",
)
EVERY_S: Final = 0.25
# Episodes of one call that have more than one.
_REPEATED: Final = """
    SELECT coalesce(sum(times - 1), 0) FROM
      (SELECT count(*) AS times FROM transitions GROUP BY episode_id) AS counted
"""


@dataclass(slots=True)
class Scrapes:
    """Count what `/metrics` answered.

    Attributes:
        read: how often it was read.
        unanswered: how often the ingesting process was away, or not up yet.
        failed: answers that were no metrics.
        off: scrapes whose outcomes did not add up to what was recorded.
        most_spooled: the most records that waited.
        dropped: counted since the beginning: a proxy that is started anew begins again at 0.
    """

    read: int = 0
    unanswered: int = 0
    failed: list[str] = field(default_factory=list)
    off: list[dict[str, float]] = field(default_factory=list)
    most_spooled: float = 0.0
    dropped: float = 0.0
    _last_dropped: float = 0.0

    def note(self, samples: dict[str, float]) -> None:
        self.read += 1
        self.most_spooled = max(self.most_spooled, samples.get(SPOOLED, 0.0))
        dropped = samples.get(DROPPED, 0.0)
        self.dropped += dropped - (self._last_dropped if dropped >= self._last_dropped else 0.0)
        self._last_dropped = dropped
        if samples.get(RECORDED, 0.0) != sum(samples.get(name, 0.0) for name in OUTCOMES):
            self.off.append({name: samples.get(name, 0.0) for name in (RECORDED, *OUTCOMES)})


async def scrape(admin: int, scrapes: Scrapes) -> dict[str, float] | None:
    """Read the samples without labels once; None if there was no answer."""
    try:
        answer = await asyncio.wait_for(fetch(admin, "/metrics"), 10)
    except (*BROKEN, TimeoutError):
        scrapes.unanswered += 1
        return None
    if answer.status != 200:
        scrapes.failed.append(answer.body[-200:].decode(errors="replace"))
        return None
    lines = answer.body.decode().splitlines()
    pairs = [line.split(" ") for line in lines if line[:1] != "#" and "{" not in line]
    samples = {name: float(value) for name, value in pairs}
    scrapes.note(samples)
    return samples


async def scraping(admin: int, scrapes: Scrapes) -> None:
    """Read the metrics until cancelled."""
    while True:
        await scrape(admin, scrapes)
        await asyncio.sleep(EVERY_S)


async def drained(admin: int, scrapes: Scrapes, *, within_s: float) -> float | None:
    """Wait until nothing is spooled; return after how many seconds.

    Return None once `within_s` seconds have passed in which the spool never had less than before:
    a busy machine drains slowly, and that is no fault.
    """
    loop = asyncio.get_running_loop()
    began = moved = loop.time()
    least = math.inf
    while loop.time() - moved < within_s:
        samples = await scrape(admin, scrapes)
        spooled = math.inf if samples is None else samples.get(SPOOLED, math.inf)
        if spooled == 0:
            return round(loop.time() - began, 2)
        if spooled < least:
            least, moved = spooled, loop.time()
        await asyncio.sleep(EVERY_S)
    return None


class Kept(NamedTuple):
    """Compare calls that were answered with those that are stored.

    `twice` is only known where every call names an episode of its own.
    """

    answered: int
    stored: int
    missing: int
    twice: int | None


async def kept(url: str, answered: Sequence[str], *, own_episodes: bool) -> Kept:
    """Compare the calls of these ids with what is stored."""
    connection = await asyncpg.connect(url)
    try:
        stored = await connection.fetchval("SELECT count(*) FROM transitions")
        there = await connection.fetchval(
            "SELECT count(*) FROM transitions WHERE id = ANY($1)", [UUID(c) for c in answered]
        )
        twice = int(await connection.fetchval(_REPEATED)) if own_episodes else None
    finally:
        await connection.close()
    return Kept(len(answered), stored, len(set(answered)) - there, twice)
