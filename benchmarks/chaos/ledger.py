"""Read what PostgreSQL and the dead letters have of the calls whose end the clients saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg

from proxy.spool.segments import CapturedCall, decode_payload
from store.ids import time_of
from store.link.lapses import SLACK
from store.write.gaps import LOST_CALL

_REPEATED: Final = """
    SELECT coalesce(sum(times - 1), 0) FROM
      (SELECT count(*) AS times FROM transitions GROUP BY episode_id) AS found
"""
# Episodes that were under way in a lapse, and may be trained on all the same.
_NOT_ASIDE: Final = """
    SELECT count(*) FROM episodes e WHERE quarantined_reason IS NULL AND EXISTS (
        SELECT FROM lapses WHERE e.last_call_at >= called_since AND e.first_call_id < began_before)
"""
# When a call began and ended, Unix time in seconds.
Times = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Kept:
    """Compare calls that were answered with those that are stored."""

    answered: int
    stored: int
    missing: int
    # Only known where every call names an episode of its own.
    twice: int | None


async def kept(url: str, answered: Sequence[str], *, own_episodes: bool) -> Kept:
    """Compare."""
    connection = await asyncpg.connect(url)
    try:
        stored = await connection.fetchval("SELECT count(*) FROM transitions")
        found = await connection.fetchval(
            "SELECT count(*) FROM transitions WHERE id = ANY($1)", [UUID(c) for c in answered]
        )
        twice = int(await connection.fetchval(_REPEATED)) if own_episodes else None
    finally:
        await connection.close()
    return Kept(len(answered), stored, len(set(answered)) - found, twice)


@dataclass(frozen=True, slots=True)
class Ends:
    """Tell where the calls ended that are not stored."""

    # The disk refused the record, and the ledger says that the episode misses a call.
    marked: list[str]
    # The disk refused it while a lapse lasted: the ledger says that calls of that time were lost.
    lapsed: list[str]
    # The record cannot be read or stored, and lies beside the spool with the reason.
    dead: list[str]
    missing: list[str]
    lapses: int
    # How many episodes of the time of a lapse were not set aside.
    not_aside: int


async def ends(
    url: str, spool: Path, answered: Mapping[str, str], times: Mapping[str, Times]
) -> Ends:
    """Find where each call ended; `answered` is by call its episode, and `times` when it was."""
    connection = await asyncpg.connect(url)
    try:
        wanted = [UUID(call) for call in answered]
        rows = await connection.fetch("SELECT id FROM transitions WHERE id = ANY($1)", wanted)
        gone = set(answered) - {str(row["id"]) for row in rows}
        episodes = [answered[call] for call in gone]
        rows = await connection.fetch(
            "SELECT key FROM episodes WHERE key = ANY($1) AND quarantined_reason = $2",
            episodes,
            LOST_CALL,
        )
        marked = {row["key"] for row in rows}
        lapses = await _lapses(connection)
        not_aside = int(await connection.fetchval(_NOT_ASIDE))
    finally:
        await connection.close()
    dead = sorted(gone & dead_calls(spool))
    lost = sorted(call for call in gone.difference(dead) if answered[call] in marked)
    unnamed = gone.difference(dead, lost)
    lapsed = sorted(call for call in unnamed if call in times and within(times[call], lapses))
    return Ends(
        marked=lost,
        lapsed=lapsed,
        dead=dead,
        missing=sorted(unnamed.difference(lapsed)),
        lapses=len(lapses),
        not_aside=not_aside,
    )


async def _lapses(connection: Any) -> list[Times]:
    """Return from when to when each lapse was, without the time that is added at both ends."""
    rows = await connection.fetch("SELECT called_since, began_before FROM lapses")
    return [
        ((since + SLACK).timestamp(), (time_of(before) - SLACK).timestamp())
        for since, before in rows
    ]


def within(call: Times, lapses: Sequence[Times]) -> bool:
    """Return whether a call may have been recorded in a lapse: it ended in it, or just after."""
    began, ended = call
    return any(since <= ended and began <= until for since, until in lapses)


def dead_calls(spool: Path) -> set[str]:
    """Return the calls among the dead letters that have a reason beside them."""
    found = set()
    for letter in (spool / "dead").glob("*.letter"):
        try:
            frame = decode_payload(letter.read_bytes())
        except ValueError:
            continue
        if isinstance(frame, CapturedCall) and letter.with_suffix(".reason").exists():
            found.add(str(UUID(bytes=frame.id)))
    return found


def without_letter(spool: Path, segments: Sequence[str]) -> list[str]:
    """Return those segments that left no dead letter with a reason."""
    buried = [path.name for path in (spool / "dead").glob("*.reason") if path.stat().st_size]
    return [name for name in segments if not any(one.startswith(f"{name}-") for one in buried)]
