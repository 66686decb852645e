"""Ask the ledger about API keys and tasks: who is there, and what waits for its cap.

`ready` is the query of what waits for a policy, with the columns `api_key` and `task`, and `values`
are its parameters (`store.updates.ready`).
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.caps.choosing import Past
from store.caps.sources import NO_KEY, Kind, Source, limit_of
from store.schema.trained import REBUILT

# How many of the last updates are looked at for other keys than those that wait.
PAST_UPDATES: Final = 32
NAMES: Final[Mapping[Kind, str]] = {"key": f"COALESCE(api_key, '{NO_KEY}')", "task": "task"}
_NAMED: Final = "SELECT DISTINCT {name} AS name FROM ({ready}) r LIMIT 2"
_CAPPED: Final = """
    SELECT coalesce(sum(episodes - :most), 0) FROM (
        SELECT count(*) AS episodes FROM ({ready}) r
        WHERE {name} IS NOT NULL GROUP BY {name}) counted
    WHERE episodes > :most
"""
# Deleted ones have lost their key. OFFSET 0 makes the planner look each update up: it would rather
# read all that was ever consumed.
_PAST: Final = f"""
    SELECT {{name}} AS name,
        extract(epoch FROM now() - max(claimed_at) FILTER (WHERE trained)) AS trained_s
    FROM (SELECT id, claimed_at FROM updates
          WHERE policy = :policy AND state = 'done' AND NOT metrics ? '{REBUILT}'
          ORDER BY claimed_at DESC LIMIT {PAST_UPDATES}) u
    CROSS JOIN LATERAL (
        SELECT episode_id, policy, trained FROM consumptions WHERE update_id = u.id OFFSET 0) c
    JOIN episode_policies USING (episode_id, policy)
    WHERE claimable GROUP BY 1
"""


def but_full(full: Collection[Source]) -> tuple[str, dict[str, Any]]:
    """Return what a query of a policy's rows ends with to leave out sources, and its values."""
    but, values = "", dict[str, Any]()
    for kind, name in NAMES.items():
        names = sorted(source.name for source in full if source.kind == kind)
        if names:
            but += f" AND COALESCE({name} <> ALL(CAST(:full_{kind}s AS text[])), true)"
            values[f"full_{kind}s"] = names
    return but, values


async def recall(
    connection: AsyncConnection, kinds: Collection[Kind], ready: str, values: Mapping[str, Any]
) -> Past:
    """Return which kinds have one source alone, and when each source was trained on last."""
    lone: set[Kind] = set()
    trained_s: dict[Source, float] = {}
    for kind in kinds:
        query = text(_PAST.format(name=NAMES[kind]))
        past = {row.name: row.trained_s for row in await connection.execute(query, dict(values))}
        for name, seconds in past.items():
            if name is not None and seconds is not None:
                trained_s[Source(kind, name)] = float(seconds)
        names = set(past)
        if len(names) < 2:
            query = text(_NAMED.format(name=NAMES[kind], ready=ready))
            names |= set((await connection.execute(query, dict(values))).scalars())
        if len(names) < 2:
            lone.add(kind)
    return Past(lone=frozenset(lone), trained_s=trained_s)


async def capped_episodes(
    connection: AsyncConnection,
    caps: Mapping[Kind, float],
    sizes: tuple[int, int],
    ready: str,
    values: Mapping[str, Any],
) -> dict[Kind, int]:
    """Return how many episodes wait beyond what a whole update may take of their source.

    `sizes` are the groups of a whole update and the episodes of a group. Those of a source that is
    alone are not counted.
    """
    groups, group_size = sizes
    capped: dict[Kind, int] = {}
    for kind, cap in caps.items():
        most = limit_of(cap, groups * group_size, group_size)
        query = text(_CAPPED.format(name=NAMES[kind], ready=ready))
        over = int(await connection.scalar(query, {**values, "most": most}) or 0)
        is_lone = over > 0 and kind in (await recall(connection, [kind], ready, values)).lone
        capped[kind] = 0 if is_lone else over
    return capped
