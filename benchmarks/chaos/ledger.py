"""Read what PostgreSQL and the dead letters have of the calls whose end the clients saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import asyncpg

from proxy.calls.capture import CapturedCall
from proxy.spool.segments import decode_payload
from store.write.gaps import LOST_CALL

_REPEATED: Final = """
    SELECT coalesce(sum(times - 1), 0) FROM
      (SELECT count(*) AS times FROM transitions GROUP BY episode_id) AS found
"""


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
    # The record cannot be read or stored, and lies beside the spool with the reason.
    dead: list[str]
    missing: list[str]


async def ends(url: str, spool: Path, answered: Mapping[str, str]) -> Ends:
    """Find where each call ended; `answered` is by call its episode."""
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
    finally:
        await connection.close()
    dead = sorted(gone & dead_calls(spool))
    lost = sorted(call for call in gone.difference(dead) if answered[call] in marked)
    return Ends(marked=lost, dead=dead, missing=sorted(gone.difference(dead, lost)))


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
