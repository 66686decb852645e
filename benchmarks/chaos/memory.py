"""Measure whether a process of the proxy grows with many calls."""

import asyncio
from typing import Any, Final

from benchmarks.chaos.load import Load
from benchmarks.chaos.scrape import Scrapes, drained
from benchmarks.chaos.stand import Stand

AT_ONCE: Final = 16
POINTS: Final = 10
# Every memory of the proxy is bounded, and fills first: the ledger's bases (64 MiB) last, after
# some 100,000 calls of this kind. So many times the calls that are judged come before them.
WARM_UP: Final = 1.2
DRAIN_S: Final = 300.0


async def memory(stand: Stand, calls: int) -> dict[str, Any]:
    """Return memory of worker and ingester over so many calls, once their caches are full."""
    await stand.ready()
    load = Load(stand.port, at_once=AT_ONCE, pause_s=0.0, calls_per_episode=10)
    load.start()
    points = [{"calls": 0.0, **_resident(stand)}]
    warm = int(WARM_UP * calls)
    for wanted in (warm + calls * number // POINTS for number in range(POINTS + 1)):
        await load.reached(wanted)
        points.append({"calls": len(load.outcome.complete), **_resident(stand)})
    await load.stop()
    drain_s = await drained(stand.admin, Scrapes(), within_s=DRAIN_S)
    idle = _resident(stand)
    await asyncio.to_thread(stand.stop)
    judged = points[1:]
    return {
        "points": points,
        "after_drain": idle,
        "drain_s": drain_s,
        "failed": [why for _, why in load.outcome.failed],
        "bytes_a_call": {name: slope(judged, name) for name in idle},
    }


def _resident(stand: Stand) -> dict[str, float]:
    """Return resident MiB by process."""
    found = {}
    for kind in ("ingester", "worker"):
        for number, process in enumerate(stand.processes(kind)):
            found[f"{kind} {number}"] = round(process.memory_info().rss / 2**20, 1)
    return found


def slope(points: list[dict[str, float]], name: str) -> float:
    """Return the bytes by which a process grows a call: a line through the points."""
    xs, ys = [p["calls"] for p in points], [p[name] * 2**20 for p in points]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    rise = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return round(rise / spread, 1) if spread else 0.0
