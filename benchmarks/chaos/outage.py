"""Take the database away for minutes under load, and see whether any request notices."""

import asyncio
import time
from typing import Any, Final

from benchmarks.chaos.ledger import kept
from benchmarks.chaos.load import Load
from benchmarks.chaos.scrape import Scrapes, drained, scraping
from benchmarks.chaos.stand import Stand

AT_ONCE: Final = 8
PAUSE_S: Final = 0.06
LEAST_BEFORE_S: Final = 10.0
DRAIN_S: Final = 600.0


async def outage(stand: Stand, seconds: float) -> dict[str, Any]:
    """Take the database away for so long; latency before and meanwhile, and what is stored."""
    await stand.ready()
    load = Load(stand.port, at_once=AT_ONCE, pause_s=PAUSE_S, calls_per_episode=10)
    scrapes = Scrapes()
    watching = asyncio.create_task(scraping(stand.admin, scrapes))
    load.start()
    await asyncio.sleep(2.0)
    began = time.monotonic()
    await asyncio.sleep(max(LEAST_BEFORE_S, seconds / 10))
    gone = time.monotonic()
    await asyncio.to_thread(stand.postgres.stop)
    await asyncio.sleep(seconds)
    back = time.monotonic()
    await stand.start_postgres()
    drain_s = await _drained_under_load(stand, load, scrapes)
    watching.cancel()
    await asyncio.to_thread(stand.stop)
    found = await kept(stand.url, load.outcome.complete, own_episodes=False)
    took = load.outcome.took
    return {
        "away_s": round(back - gone, 1),
        "answered": found.answered,
        "failed": [why for _, why in load.outcome.failed],
        "before": latency([t for at, t in took if began <= at < gone]),
        "meanwhile": latency([t for at, t in took if gone <= at < back]),
        "after": latency([t for at, t in took if at >= back]),
        "most_spooled": scrapes.most_spooled,
        "drain_s": drain_s,
        "stored": found.stored,
        "missing": found.missing,
        "scrapes": scrapes.read,
        "scrapes_failed": scrapes.failed,
        "scrapes_off": scrapes.off,
    }


async def _drained_under_load(stand: Stand, load: Load, scrapes: Scrapes) -> float | None:
    """Return how long the backlog takes, with the clients still asking."""
    began = time.monotonic()
    for _ in range(int(4 * DRAIN_S)):
        if await _is_level(stand, scrapes):
            break
        await asyncio.sleep(0.25)
    level = time.monotonic() - began
    await load.stop()
    done = await drained(stand.admin, scrapes, within_s=DRAIN_S)
    return None if done is None else round(level, 1)


async def _is_level(stand: Stand, scrapes: Scrapes) -> bool:
    """Return whether no more waits than a moment's calls."""
    probe = Scrapes()
    await drained(stand.admin, probe, within_s=0.01)
    scrapes.off += probe.off
    return probe.read > 0 and probe.most_spooled <= 4 * AT_ONCE


def latency(took: list[float]) -> dict[str, float]:
    """Return median, p99 and the longest, in milliseconds."""
    ordered = sorted(took)
    if not ordered:
        return {"calls": 0}
    at = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    last = len(ordered) - 1
    found = {name: round(1000 * ordered[int(share * last)], 2) for name, share in at.items()}
    return {"calls": len(ordered)} | found
