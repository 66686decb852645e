"""`kill -9` at random moments, of random processes, under load."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from benchmarks.chaos.ledger import kept
from benchmarks.chaos.load import Load, Outcome
from benchmarks.chaos.scrape import Scrapes, drained, scraping
from benchmarks.chaos.stand import PARTS, Part, Stand

AT_ONCE: Final = 16
PAUSE_S: Final = 0.02
QUIET_S: Final = (0.05, 1.0)
DRAIN_S: Final = 120.0
# A client sees a reset a moment after the kill.
SLACK_S: Final = 0.5
# Which kills may fail a call: those of a process that has calls in flight.
COSTLY: Final[frozenset[Part]] = frozenset({"worker", "supervisor"})


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: from when to when all was back."""

    part: Part
    at: float
    back: float


async def kills(stand: Stand, count: int, seed: int) -> dict[str, Any]:
    """Kill so many times; what it cost."""
    dice = random.Random(seed)
    await stand.ready()
    load = Load(stand.port, at_once=AT_ONCE, pause_s=PAUSE_S, calls_per_episode=1)
    scrapes = Scrapes()
    watching = asyncio.create_task(scraping(stand.admin, scrapes))
    load.start()
    done: list[Kill] = []
    for _ in range(count):
        await asyncio.sleep(dice.uniform(*QUIET_S))
        part = dice.choice(PARTS)
        began = time.monotonic()
        await stand.kill(part, dice.randrange(stand.workers))
        done.append(Kill(part, began, time.monotonic()))
    await load.stop()
    watching.cancel()
    drain_s = await drained(stand.admin, scrapes, within_s=DRAIN_S)
    await asyncio.to_thread(stand.stop)
    found = await kept(stand.url, load.outcome.complete, own_episodes=True)
    return _report(done, load.outcome, scrapes) | {
        "drain_s": None if drain_s is None else round(drain_s, 2),
        "stored": found.stored,
        "missing": found.missing,
        "twice": found.twice,
    }


def _report(done: list[Kill], outcome: Outcome, scrapes: Scrapes) -> dict[str, Any]:
    blamed: dict[str, Counter[str]] = {}
    for at, why in outcome.failed:
        part = blame(at, done)
        if part is not None:
            blamed.setdefault(part, Counter())[why] += 1
    unexplained = [why for at, why in outcome.failed if blame(at, done) is None]
    away: dict[str, list[float]] = {}
    for kill in done:
        away.setdefault(kill.part, []).append(kill.back - kill.at)
    return {
        "kills": dict(Counter(kill.part for kill in done)),
        "back_after_s": {part: _middle_and_worst(times) for part, times in away.items()},
        "answered": len(outcome.complete),
        "failed_by_kills": {part: reasons.total() for part, reasons in blamed.items()},
        "failed_how": {part: dict(reasons.most_common(5)) for part, reasons in blamed.items()},
        "failed_otherwise": unexplained,
        "refused_connections": outcome.refused,
        "scrapes": scrapes.read,
        "scrapes_unanswered": scrapes.unanswered,
        "scrapes_failed": scrapes.failed,
        "scrapes_off": scrapes.off,
    }


def _middle_and_worst(times: list[float]) -> list[float]:
    return [round(median(times), 2), round(max(times), 2)]


def blame(at: float, done: list[Kill]) -> Part | None:
    """The kill that a failure at that time is due to."""
    for kill in reversed(done):
        if kill.part in COSTLY and kill.at <= at <= kill.back + SLACK_S:
            return kill.part
    return None
