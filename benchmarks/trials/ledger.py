"""Read from the ledger which version each episode began with, what it was worth, and its states."""

from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.read.events import list_events
from store.records import Arm, Record
from store.versions import PolicyEvent

_BEGUN: Final = text(
    """
    SELECT t.arm, t.policy_version AS version, t.started_at AS at, f.value AS reward
    FROM episodes e JOIN transitions t ON t.id = e.first_call_id
    LEFT JOIN feedback f ON f.episode_id = e.id AND f.metric = 'reward'
    WHERE t.policy = :policy AND t.arm IS NOT NULL ORDER BY t.started_at, t.id
    """
)


class Begun(Record, frozen=True, kw_only=True):
    """Describe an episode by the arm and the version that it began with; None: not scored."""

    arm: Arm
    version: int
    at: datetime
    reward: float | None


async def begun(engine: AsyncEngine, policy: str) -> list[Begun]:
    """Return the episodes of a policy, in the order in which they began."""
    async with engine.connect() as connection:
        rows = await connection.execute(_BEGUN, {"policy": policy})
        return [Begun(**row._mapping) for row in rows]


async def events(engine: AsyncEngine, policy: str, version: int) -> list[PolicyEvent]:
    """Return how the state of a version changed, oldest first."""
    async with engine.connect() as connection:
        return list(reversed(await list_events(connection, policy, version)))
