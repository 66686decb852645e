"""Kill random processes at random moments (`kill -9`) under load, and fail the disk in between.

With faults, the spool's disk is full or gives I/O errors for a while between two kills, and one
call in 200 gets a reply that is hard to keep. A call that is answered meanwhile is stored, or its
record was refused by the disk: then a counter counts it, and the ledger says that its episode
misses a call, or that calls of that time were lost (a lapse). After a short fault nothing is killed
until calls are recorded again, so that the ledger has the names. With `full_s` the disk is also
full for that long once, and processes are killed meanwhile: what they had in memory is gone.
"""

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from benchmarks.chaos.faults import FAULTS, Fault
from benchmarks.chaos.ledger import ends, kept, without_letter
from benchmarks.chaos.load import Load, Outcome
from benchmarks.chaos.poison import EVERY, Laid, lay
from benchmarks.chaos.scrape import Scrapes, drained, scrape, scraping
from benchmarks.chaos.stand import PARTS, NotReady, Part, Stand

AT_ONCE: Final = 16
PAUSE_S: Final = 0.02
QUIET_S: Final = (0.05, 1.0)
FAULT_S: Final = (0.3, 1.5)
# What is killed while the disk stays full.
ON_FULL_DISK: Final[tuple[Part, ...]] = ("worker", "worker", "ingester", "supervisor")
# One fault to so many kills, and one of each kind at least.
KILLS_A_FAULT: Final = 4
# Every worker that has calls has told the ledger of what it missed after so many more of them.
CALLS_AFTER_FAULT: Final = 20 * AT_ONCE
CALLS_WITHIN_S: Final = 60.0
DRAIN_S: Final = 120.0
# A client sees a reset a moment after the kill.
SLACK_S: Final = 0.5
# Which kills may fail a call: those of a process that has calls in flight.
COSTLY: Final[frozenset[Part]] = frozenset({"worker", "supervisor"})


@dataclass(frozen=True, slots=True)
class Kill:
    """Describe one kill: from when to when all was back."""

    part: Part
    at: float
    back: float


@dataclass(slots=True)
class Happened:
    """Note what was done to the proxy."""

    kills: list[Kill] = field(default_factory=list)
    faults: Counter[Fault] = field(default_factory=Counter)
    laid: Laid = field(default_factory=Laid)
    # From when to when (monotonic) what was counted went with a supervisor, before it was read.
    uncounted: list[tuple[float, float]] = field(default_factory=list)
    # Where it did not go on as it should: not ready again, too few calls answered, not stopped.
    stalled: list[str] = field(default_factory=list)


async def kills(
    stand: Stand, count: int, seed: int, full_s: float = 0.0, pause_s: float = PAUSE_S
) -> dict[str, Any]:
    """Kill so many times; what it cost. The disk fails too where the stand has one of its own.

    Args:
        stand: the processes.
        count: number of kills.
        seed: chooses what is killed when.
        full_s: for how many seconds the disk stays full once, while more is killed.
        pause_s: how long each of `AT_ONCE` clients waits after a call, in seconds.
    """
    dice = random.Random(seed)
    await stand.ready()
    load = Load(
        stand.port,
        at_once=AT_ONCE,
        pause_s=pause_s,
        calls_per_episode=1,
        poisoned=stand.disk is not None,
    )
    scrapes, done = Scrapes(), Happened()
    watching = asyncio.create_task(scraping(stand.admin, scrapes))
    load.start()
    try:
        if full_s:
            await _kill_on_full_disk(stand, full_s, load, done, dice, scrapes)
        for event in _events(count, dice, faulty=stand.disk is not None):
            await asyncio.sleep(dice.uniform(*QUIET_S))
            # Counts begin again at 0 with a new supervisor: they are read before one is killed.
            await scrape(stand.admin, scrapes)
            await _happen(event, stand, load, done, dice)
    except NotReady as error:
        done.stalled.append(str(error))
    await load.stop()
    watching.cancel()
    drain_s = await drained(stand.admin, scrapes, within_s=DRAIN_S)
    try:
        await asyncio.to_thread(stand.stop)
    except subprocess.TimeoutExpired:
        done.stalled.append("it did not stop when it was told to")
    return (
        _report(done.kills, load.outcome, scrapes)
        | {"drain_s": None if drain_s is None else round(drain_s, 2)}
        | await _compared(stand, load.outcome, done, scrapes)
        | {"stalled": done.stalled, "ended_by_itself": stand.ended_by_itself}
    )


def _events(count: int, dice: random.Random, *, faulty: bool) -> Sequence[Fault | None]:
    """Yield None for each kill, and faults between them."""
    if not faulty:
        return [None] * count
    faults = [FAULTS[n % len(FAULTS)] for n in range(max(len(FAULTS), count // KILLS_A_FAULT))]
    events: list[Fault | None] = [*faults, *[None] * count]
    dice.shuffle(events)
    return events


async def _happen(
    event: Fault | None, stand: Stand, load: Load, done: Happened, dice: random.Random
) -> None:
    if event is None:
        await _kill(stand, done, dice)
    else:
        await _fail(stand, event, load, done, dice)
    if stand.disk is not None:
        _poison(stand, load.outcome, done, dice)


async def _kill(
    stand: Stand, done: Happened, dice: random.Random, parts: Sequence[Part] = PARTS
) -> None:
    part = dice.choice(parts)
    began = time.monotonic()
    await stand.kill(part, dice.randrange(stand.workers))
    done.kills.append(Kill(part, began, time.monotonic()))


async def _fail(
    stand: Stand, fault: Fault, load: Load, done: Happened, dice: random.Random
) -> None:
    """Let the disk fail, and wait until calls are recorded again."""
    assert stand.disk is not None
    await stand.disk.suffer(fault, dice.uniform(*FAULT_S))
    done.faults[fault] += 1
    await _recorded_again(stand, fault, load, done)


async def _kill_on_full_disk(
    stand: Stand,
    seconds: float,
    load: Load,
    done: Happened,
    dice: random.Random,
    scrapes: Scrapes,
) -> None:
    """Keep the disk full for so long, and kill what serves and stores meanwhile."""
    assert stand.disk is not None
    await load.reached(CALLS_AFTER_FAULT)
    full = asyncio.create_task(stand.disk.suffer("full disk", seconds))
    try:
        while not full.done():
            await asyncio.sleep(dice.uniform(*QUIET_S))
            read = time.monotonic()
            await scrape(stand.admin, scrapes)
            await _kill(stand, done, dice, ON_FULL_DISK)
            if done.kills[-1].part == "supervisor":
                done.uncounted.append((read, done.kills[-1].at + SLACK_S))
    finally:
        await full
    done.faults["full disk"] += 1
    await _recorded_again(stand, "full disk", load, done)


async def _recorded_again(stand: Stand, fault: Fault, load: Load, done: Happened) -> None:
    """Wait until the fault is over, and told of by every worker that has calls."""
    await stand.ready()
    try:
        async with asyncio.timeout(CALLS_WITHIN_S):
            await load.reached(len(load.outcome.complete) + CALLS_AFTER_FAULT)
    except TimeoutError:
        done.stalled.append(f"after {fault}")


def _poison(stand: Stand, outcome: Outcome, done: Happened, dice: random.Random) -> None:
    """Lay as many poisoned segments as calls say."""
    while len(done.laid.poisoned) < len(outcome.complete) // EVERY:
        try:
            lay(stand.spool, dice, done.laid)
        except OSError:
            # So much waits for the database that the disk is full by itself: it is laid later.
            return


async def _compared(
    stand: Stand, outcome: Outcome, done: Happened, scrapes: Scrapes
) -> dict[str, Any]:
    """Compare what the clients saw, and what was laid down, with what is kept."""
    answered = outcome.episodes | done.laid.whole
    found = await kept(stand.url, list(answered), own_episodes=True)
    if stand.disk is None:
        return {"stored": found.stored, "missing": found.missing, "twice": found.twice}
    ended = await ends(stand.url, stand.spool, answered, outcome.times())
    uncounted = sum(any(a <= at <= b for a, b in done.uncounted) for at, _ in outcome.took)
    dropped = len(ended.marked) + len(ended.lapsed) - uncounted
    return {
        "stored": found.stored,
        "missing": len(ended.missing),
        "twice": found.twice,
        "faults": dict(done.faults),
        "dropped_and_marked": len(ended.marked),
        "dropped_in_lapses": len(ended.lapsed),
        "lapses": ended.lapses,
        "not_aside": ended.not_aside,
        "dropped_uncounted": max(0, dropped - int(scrapes.dropped)),
        "poisoned_calls": len(outcome.poisoned),
        "poisoned_calls_dead": len(ended.dead),
        "poisoned_segments": len(done.laid.poisoned),
        "poison_not_dead": without_letter(stand.spool, done.laid.poisoned),
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
    """Return the kill that a failure at that time is due to."""
    for kill in reversed(done):
        if kill.part in COSTLY and kill.at <= at <= kill.back + SLACK_S:
            return kill.part
    return None
