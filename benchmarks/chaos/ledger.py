"""What PostgreSQL has of the calls whose end the clients saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg

_REPEATED: Final = """
    SELECT coalesce(sum(times - 1), 0) FROM
      (SELECT count(*) AS times FROM transitions GROUP BY episode_id) AS found
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """Calls that were answered, against those that are stored."""

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
