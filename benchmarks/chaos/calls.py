"""No call is lost: kill random processes at random moments (`kill -9`) under load.

With faults, the spool's disk is full or gives I/O errors for a while between two kills, one call in
200 gets a reply that is hard to store, and as often an unreadable segment is put into the spool.
Each answered call must be stored, become a dead letter with a reason, or be counted as refused by
the disk: the ledger then says that its episode misses a call, or that calls of that time were lost
(a recording outage). After a fault nothing is killed for some calls, so that the workers can tell
the ledger the episodes' names.

`measure_outage` stops the database for minutes instead: no request may fail, and all is stored.
"""

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from uuid import UUID

import asyncpg

from benchmarks.report import percentile
from proxy.spool.segments import (
    HEAD_BYTES,
    CapturedCall,
    decode_payload,
    encode_frame,
    frame_payload,
)
from store.ids import new_id, time_of
from store.link.outages import LOST_CALL, SLACK
from tests.support.faults.ledger import SPOOLED, Scrapes, drained, kept, scrape, scraping
from tests.support.faults.load import EVERY, Load, Outcome
from tests.support.faults.stand import FAULTS, PARTS, Fault, NotReady, Part, Stand
from tests.support.records import captured

AT_ONCE: Final = 16
PAUSE_S: Final = 0.02
QUIET_S: Final = (0.05, 1.0)
FAULT_S: Final = (0.3, 1.5)
# Kills for each fault; there is at least one fault of each kind.
KILLS_A_FAULT: Final = 4
# After this many more calls, every worker with calls should have reported its lost calls.
CALLS_AFTER_FAULT: Final = 20 * AT_ONCE
CALLS_WITHIN_S: Final = 60.0
DRAIN_S: Final = 120.0
OUTAGE_DRAIN_S: Final = 600.0
# So few spooled records are normal with the clients of `measure_outage`.
LEVEL: Final = 32
# A client may see a reset this long after the kill.
SLACK_S: Final = 0.5
# Only kills of processes with calls in flight may fail a call.
COSTLY: Final[frozenset[Part]] = frozenset({"worker", "supervisor"})
FOREIGN: Final = b"\x93\x01\x02"
# Counts episodes that were under way in an outage and are not quarantined.
_UNQUARANTINED: Final = """
    SELECT count(*) FROM episodes e WHERE quarantined_reason IS NULL AND EXISTS (
        SELECT FROM recording_outages
        WHERE e.last_call_at >= called_since AND e.first_call_id < began_before)
"""


class Kill(NamedTuple):
    """One kill: what was killed, when, and when everything was back."""

    part: Part
    at: float
    back: float


@dataclass(slots=True)
class InjectedFaults:
    """The kills and faults that the proxy suffered.

    Attributes:
        kills: the kills.
        faults: how often the disk failed, by kind of fault.
        laid: the episode of each valid call that was put into the spool, by call.
        poisoned: the names of the poisoned segments that were put into the spool.
        stalled: when the proxy did not recover: not ready again, too few calls, not stopped.
    """

    kills: list[Kill] = field(default_factory=list)
    faults: Counter[Fault] = field(default_factory=Counter)
    laid: dict[str, str] = field(default_factory=dict)
    poisoned: list[str] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)


async def kill_under_load(
    stand: Stand, count: int, seed: int, pause_s: float = PAUSE_S
) -> dict[str, Any]:
    """Kill processes under load, and return the report; a stand with a disk of its own has faults.

    Args:
        stand: the processes.
        count: number of kills.
        seed: chooses what is killed and when.
        pause_s: how long each of `AT_ONCE` clients waits after a call, in seconds.
    """
    dice, has_faults = random.Random(seed), stand.disk is not None
    await stand.ready()
    load = Load(
        stand.port, at_once=AT_ONCE, pause_s=pause_s, calls_per_episode=1, poisoned=has_faults
    )
    scrapes, done = Scrapes(), InjectedFaults()
    watching = asyncio.create_task(scraping(stand.admin, scrapes))
    load.start()
    events: list[Fault | None] = [None] * count
    if has_faults:
        events += [FAULTS[n % len(FAULTS)] for n in range(max(len(FAULTS), count // KILLS_A_FAULT))]
        dice.shuffle(events)
    try:
        for event in events:
            await asyncio.sleep(dice.uniform(*QUIET_S))
            # A new supervisor counts from 0: read the counters before a kill.
            await scrape(stand.admin, scrapes)
            if event is None:
                part, began = dice.choice(PARTS), time.monotonic()
                await stand.kill(part, dice.randrange(stand.workers))
                done.kills.append(Kill(part, began, time.monotonic()))
            else:
                await _fail_disk(stand, event, dice.uniform(*FAULT_S), load, done)
            if has_faults:
                _lay_segments(stand.spool, len(load.outcome.complete) // EVERY, dice, done)
    except NotReady as error:
        done.stalled.append(str(error))
    await load.stop()
    watching.cancel()
    drain_s = await drained(stand.admin, scrapes, within_s=DRAIN_S)
    try:
        await asyncio.to_thread(stand.stop)
    except subprocess.TimeoutExpired:
        done.stalled.append("it did not stop when asked to")
    return (
        _report(done.kills, load.outcome, scrapes)
        | {"drain_s": drain_s}
        | await _compare_stored(stand, load.outcome, done, scrapes)
        | {"stalled": done.stalled, "ended_by_itself": stand.ended_by_itself}
    )


async def _fail_disk(
    stand: Stand, fault: Fault, seconds: float, load: Load, done: InjectedFaults
) -> None:
    """Let the disk fail for `seconds`, and wait for `CALLS_AFTER_FAULT` complete calls.

    If they do not come within `CALLS_WITHIN_S`, `done.stalled` notes it.
    """
    assert stand.disk is not None
    await stand.disk.suffer(fault, seconds)
    done.faults[fault] += 1
    await stand.ready()
    try:
        async with asyncio.timeout(CALLS_WITHIN_S):
            await load.reached(len(load.outcome.complete) + CALLS_AFTER_FAULT)
    except TimeoutError:
        done.stalled.append(f"after {fault}")


def _lay_segments(spool: Path, wanted: int, dice: random.Random, done: InjectedFaults) -> None:
    """Put sealed segments into the spool, each in a folder of its own, as if a worker had left it.

    Each has a poisoned record between two valid ones: a foreign frame, or a record with one bit
    flipped. It can only become a dead letter.
    """
    while len(done.poisoned) < wanted:
        name = str(new_id())
        before, damaged, after = (
            captured(f"laid-{new_id()}", started_at=time.time()) for _ in "123"
        )
        if dice.random() < 0.5:
            bad = frame_payload(FOREIGN)
        else:
            frame = encode_frame(damaged)
            at = dice.randrange(HEAD_BYTES, len(frame))
            bad = frame[:at] + bytes([frame[at] ^ 1 << dice.randrange(8)]) + frame[at + 1 :]
        folder = spool / f"laid-{name}"
        try:
            folder.mkdir()
            unfinished = folder / "unfinished"
            unfinished.write_bytes(encode_frame(before) + bad + encode_frame(after))
            unfinished.rename(folder / f"{name}.seg")
        except OSError:
            # The waiting records fill the disk: put this segment into the spool later.
            return
        done.poisoned.append(name)
        done.laid |= {str(UUID(bytes=call.id)): call.episode for call in (before, after)}


async def _compare_stored(
    stand: Stand, outcome: Outcome, done: InjectedFaults, scrapes: Scrapes
) -> dict[str, Any]:
    """Compare the answered calls and the added segments with the stored records."""
    answered = outcome.episodes | done.laid
    stored = await kept(stand.url, list(answered), own_episodes=True)
    if stand.disk is None:
        return {"stored": stored.stored, "missing": stored.missing, "twice": stored.twice}
    ended = await _find_unstored(stand, answered, outcome.times())
    dropped = len(ended.marked) + len(ended.in_outage)
    buried = [path.name for path in (stand.spool / "dead").glob("*.reason") if path.stat().st_size]
    return {
        "stored": stored.stored,
        "missing": len(ended.missing),
        "twice": stored.twice,
        "faults": dict(done.faults),
        "dropped_and_marked": len(ended.marked),
        "dropped_in_outages": len(ended.in_outage),
        "recording_outages": ended.outages,
        "unquarantined": ended.unquarantined,
        "dropped_uncounted": max(0, dropped - int(scrapes.dropped)),
        "poisoned_calls": outcome.poisoned,
        "poisoned_calls_dead": len(ended.dead),
        "poisoned_segments": len(done.poisoned),
        "poison_not_dead": [
            name
            for name in done.poisoned
            if not any(file.startswith(f"{name}-") for file in buried)
        ],
    }


class UnstoredCalls(NamedTuple):
    """The answered calls that are not stored, by reason.

    Attributes:
        marked: the disk refused the record, and the ledger says that the episode misses a call.
        in_outage: the disk refused the record during a recording outage that the ledger has.
        dead: the record is a dead letter with a reason.
        missing: calls without such a reason.
        outages: number of recording outages.
        unquarantined: number of episodes during an outage that are not quarantined.
    """

    marked: set[str]
    in_outage: set[str]
    dead: set[str]
    missing: set[str]
    outages: int
    unquarantined: int


async def _find_unstored(
    stand: Stand, answered: Mapping[str, str], times: Mapping[str, tuple[float, float]]
) -> UnstoredCalls:
    """Sort the unstored calls by reason; `answered` has each call's episode, `times` its time."""
    connection = await asyncpg.connect(stand.url)
    try:
        ids = [UUID(call) for call in answered]
        rows = await connection.fetch("SELECT id FROM transitions WHERE id = ANY($1)", ids)
        gone = set(answered) - {str(row["id"]) for row in rows}
        rows = await connection.fetch(
            "SELECT key FROM episodes WHERE key = ANY($1) AND quarantined_reason = $2",
            [answered[call] for call in gone],
            LOST_CALL,
        )
        marked_episodes = {row["key"] for row in rows}
        rows = await connection.fetch("SELECT called_since, began_before FROM recording_outages")
        unquarantined = int(await connection.fetchval(_UNQUARANTINED))
    finally:
        await connection.close()
    # Begin and end of each outage, without the slack that is added at both ends.
    outages = [
        ((since + SLACK).timestamp(), (time_of(before) - SLACK).timestamp())
        for since, before in rows
    ]
    dead = gone & _dead_calls(stand.spool)
    marked = {call for call in gone - dead if answered[call] in marked_episodes}
    unnamed = gone - dead - marked
    # A call may have been recorded in an outage if it ended in it, or just after.
    in_outage = {
        call
        for call in unnamed & times.keys()
        if any(since <= times[call][1] and times[call][0] <= until for since, until in outages)
    }
    return UnstoredCalls(marked, in_outage, dead, unnamed - in_outage, len(outages), unquarantined)


def _dead_calls(spool: Path) -> set[str]:
    """Return the ids of dead-lettered calls that have a file with the reason."""
    calls = set()
    for letter in (spool / "dead").glob("*.letter"):
        try:
            frame = decode_payload(letter.read_bytes())
        except ValueError:
            continue
        if isinstance(frame, CapturedCall) and letter.with_suffix(".reason").exists():
            calls.add(str(UUID(bytes=frame.id)))
    return calls


def _report(done: Sequence[Kill], outcome: Outcome, scrapes: Scrapes) -> dict[str, Any]:
    blamed: dict[str, Counter[str]] = {}
    unexplained = []
    for at, why in outcome.failed:
        part = _find_kill(at, done)
        if part is None:
            unexplained.append(why)
        else:
            blamed.setdefault(part, Counter())[why] += 1
    away: dict[str, list[float]] = {}
    for kill in done:
        away.setdefault(kill.part, []).append(kill.back - kill.at)
    return {
        "kills": dict(Counter(kill.part for kill in done)),
        "back_after_s": {
            part: [round(median(times), 2), round(max(times), 2)] for part, times in away.items()
        },
        "answered": len(outcome.complete),
        "failed_by_kills": {part: reasons.total() for part, reasons in blamed.items()},
        "failed_how": {part: dict(reasons.most_common(5)) for part, reasons in blamed.items()},
        "failed_otherwise": unexplained,
        "refused_connections": outcome.refused,
        **_scrape_counts(scrapes),
    }


def _scrape_counts(scrapes: Scrapes) -> dict[str, Any]:
    return {
        "scrapes": scrapes.read,
        "scrapes_unanswered": scrapes.unanswered,
        "scrapes_failed": scrapes.failed,
        "scrapes_off": scrapes.off,
    }


def _find_kill(at: float, done: Sequence[Kill]) -> Part | None:
    """Return what was killed when a call failed at time `at`; None if no kill explains it."""
    for kill in reversed(done):
        if kill.part in COSTLY and kill.at <= at <= kill.back + SLACK_S:
            return kill.part
    return None


async def measure_outage(stand: Stand, seconds: float) -> dict[str, Any]:
    """Stop the database for `seconds`; report latency before, during and after, and lost calls."""
    await stand.ready()
    load, scrapes = Load(stand.port, at_once=8, pause_s=0.06, calls_per_episode=10), Scrapes()
    watching = asyncio.create_task(scraping(stand.admin, scrapes))
    load.start()
    await asyncio.sleep(2.0)
    began = time.monotonic()
    await asyncio.sleep(max(10.0, seconds / 10))
    gone = time.monotonic()
    await asyncio.to_thread(stand.postgres.stop)
    await asyncio.sleep(seconds)
    back = time.monotonic()
    await stand.start_postgres()
    # The clients go on while the backlog is stored, until only normally few records wait.
    while (samples := await scrape(stand.admin, scrapes)) is None or samples[SPOOLED] > LEVEL:
        if time.monotonic() - back > OUTAGE_DRAIN_S:
            break
        await asyncio.sleep(0.25)
    level_s = time.monotonic() - back
    await load.stop()
    drain_s = await drained(stand.admin, scrapes, within_s=OUTAGE_DRAIN_S)
    watching.cancel()
    await asyncio.to_thread(stand.stop)
    stored = await kept(stand.url, load.outcome.complete, own_episodes=False)
    took = load.outcome.took
    return {
        "away_s": round(back - gone, 1),
        "answered": stored.answered,
        "failed": [why for _, why in load.outcome.failed],
        "before": _latency([t for at, t in took if began <= at < gone]),
        "meanwhile": _latency([t for at, t in took if gone <= at < back]),
        "after": _latency([t for at, t in took if at >= back]),
        "most_spooled": scrapes.most_spooled,
        "level_again_s": round(level_s, 1),
        "drain_s": drain_s,
        "stored": stored.stored,
        "missing": stored.missing,
        **_scrape_counts(scrapes),
    }


def _latency(took: Sequence[float]) -> dict[str, float]:
    """Return percentiles and the maximum, in milliseconds."""
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    return {name: round(1000 * percentile(took, share), 2) for name, share in shares.items()}
