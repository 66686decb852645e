"""Set aside what a model server sampled while it was at fault, without spending it.

Rows of a server that computed something else than the trainer are known one by one, at the price of
an update each time. Once a fault is known and past, all that a policy has of its time is left where
it is: no update claims it, and it expires as what waits too long does
(docs/decisions/053-pause-after-failures.md).
"""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.schema.claimable import FREE

# A condition on rows of `episode_policies`. An episode's id is that of its first stored call, so
# comparing it limits the time at which it began.
NOT_ASIDE: Final = """
    NOT EXISTS (
        SELECT FROM fault_times f
        WHERE f.policy = :policy AND last_call_at >= f.called_since AND episode_id < f.began_before)
"""
# What was claimed for the last version that went live was right, and what ended before that claim.
_NOTE: Final = text(
    """
    INSERT INTO fault_times AS known (policy, called_since, began_before)
    VALUES (:policy, COALESCE((
        SELECT max(u.claimed_at) FROM updates u
            JOIN policies p ON (p.name, p.version) = (u.policy, u.version)
        WHERE u.policy = :policy
            AND p.state IN ('serving', 'canary', 'published', 'rolled_back', 'retired')
        ), to_timestamp(0)), :began_before)
    ON CONFLICT (policy, called_since) DO UPDATE
        SET began_before = GREATEST(known.began_before, excluded.began_before)
    """
)
_WERE: Final = text("SELECT EXISTS (SELECT FROM fault_times WHERE policy = :policy)")
_ASIDE: Final = text(
    f"SELECT count(*) FROM episode_policies WHERE policy = :policy AND {FREE} AND NOT ({NOT_ASIDE})"
)


async def note_fault(connection: AsyncConnection, policy: str) -> int:
    """Set aside what may have been sampled under a fault that is past now; return how much waits.

    The fault began after the claim of the last update whose version went live.
    """
    now = (await connection.execute(text("SELECT now()"))).scalar_one()
    await connection.execute(_NOTE, {"policy": policy, "began_before": lowest_id_at(now)})
    return int((await connection.execute(_ASIDE, {"policy": policy})).scalar_one())


async def and_not_aside(connection: AsyncConnection, policy: str) -> str:
    """Return what a query of a policy's rows ends with, to leave out what was set aside.

    It is empty for a policy whose servers never were at fault, which costs nothing then.
    """
    were = await connection.scalar(_WERE, {"policy": policy})
    return f" AND {NOT_ASIDE}" if were else ""
