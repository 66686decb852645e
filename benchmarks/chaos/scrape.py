"""Read `/metrics` again and again: do the outcomes add up to what was recorded?"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos.load import BROKEN, fetch

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


@dataclass(slots=True)
class Scrapes:
    """Count what was seen."""

    read: int = 0
    # The ingester was away, or not up yet.
    unanswered: int = 0
    # Answered, and not with metrics.
    failed: list[str] = field(default_factory=list)
    off: list[dict[str, float]] = field(default_factory=list)
    most_spooled: float = 0.0
    # Counted since the beginning: a proxy that is started anew begins again at 0.
    dropped: float = 0.0
    _last_dropped: float = 0.0

    def note(self, samples: dict[str, float]) -> None:
        """Note one scrape."""
        self.read += 1
        self.most_spooled = max(self.most_spooled, samples.get(SPOOLED, 0.0))
        dropped = samples.get(DROPPED, 0.0)
        self.dropped += dropped - (self._last_dropped if dropped >= self._last_dropped else 0.0)
        self._last_dropped = dropped
        if not adds_up(samples):
            self.off.append({name: samples.get(name, 0.0) for name in (RECORDED, *OUTCOMES)})


def adds_up(samples: dict[str, float]) -> bool:
    """Return whether recorded = stored + spooled + dead letters + dropped + deleted."""
    return samples.get(RECORDED, 0.0) == sum(samples.get(name, 0.0) for name in OUTCOMES)


def parsed(text: str) -> dict[str, float]:
    """Parse the samples without labels (Prometheus' text format)."""
    pairs = [line.split(" ") for line in text.splitlines() if line[:1] != "#" and "{" not in line]
    return {name: float(value) for name, value in pairs}


async def scrape(admin: int, found: Scrapes) -> dict[str, float] | None:
    """Read the metrics once; None if there was no answer."""
    try:
        answer = await asyncio.wait_for(fetch(admin, "/metrics"), 10)
    except (*BROKEN, TimeoutError):
        found.unanswered += 1
        return None
    if answer.status != 200:
        found.failed.append(answer.body[-200:].decode(errors="replace"))
        return None
    samples = parsed(answer.body.decode())
    found.note(samples)
    return samples


async def scraping(admin: int, found: Scrapes) -> None:
    """Read the metrics until cancelled."""
    while True:
        await scrape(admin, found)
        await asyncio.sleep(EVERY_S)


async def drained(admin: int, found: Scrapes, *, within_s: float) -> float | None:
    """Wait until nothing is spooled; return after how many seconds.

    Return None once `within_s` seconds have passed in which the spool never had less than before:
    a busy machine drains slowly, and that is no fault.
    """
    loop = asyncio.get_running_loop()
    began = moved = loop.time()
    least = math.inf
    while loop.time() - moved < within_s:
        samples = await scrape(admin, found)
        spooled = math.inf if samples is None else samples.get(SPOOLED, math.inf)
        if spooled == 0:
            return loop.time() - began
        if spooled < least:
            least, moved = spooled, loop.time()
        await asyncio.sleep(EVERY_S)
    return None
