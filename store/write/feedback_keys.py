"""Keep the idempotency keys of feedback, shared by all proxies of one database.

A body takes its key here when it is accepted; it is stored later, maybe much later
(`store.write.ingest`). Keys that were taken are deleted after a day. Keys of stored bodies are
kept (docs/decisions/031-idempotency-across-workers.md).
"""

from enum import Enum
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

KEEP: Final = "1 day"

_STORED: Final = text("SELECT body_hash FROM feedback_requests WHERE idempotency_key = :key")
# The update changes nothing, but it makes the later of two concurrent requests wait for the first,
# and returns the first's body hash to it.
_TAKE: Final = text("""
    INSERT INTO feedback_keys (idempotency_key, body_hash) VALUES (:key, :hash)
    ON CONFLICT (idempotency_key) DO UPDATE SET idempotency_key = excluded.idempotency_key
    RETURNING body_hash
""")
_GIVE_BACK: Final = text(
    "DELETE FROM feedback_keys WHERE idempotency_key = :key AND body_hash = :hash"
)
_CLEAN: Final = text(f"DELETE FROM feedback_keys WHERE at < now() - interval '{KEEP}'")


class KeyState(Enum):
    """Tell who owns a key: the same body, stored already; the same body, not stored; another."""

    STORED = "stored"
    OWN = "own"
    ANOTHERS = "another's"


async def take_key(connection: AsyncConnection, key: str, body_hash: str) -> KeyState:
    """Take a key for a body unless another body has it, and commit."""
    stored = set((await connection.execute(_STORED, {"key": key})).scalars())
    if stored:
        return KeyState.STORED if body_hash in stored else KeyState.ANOTHERS
    taken = await connection.execute(_TAKE, {"key": key, "hash": body_hash})
    state = KeyState.OWN if taken.scalar() == body_hash else KeyState.ANOTHERS
    await connection.commit()
    return state


async def give_key_back(connection: AsyncConnection, key: str, body_hash: str) -> None:
    """Free a key whose body was not accepted after all, and commit."""
    await connection.execute(_GIVE_BACK, {"key": key, "hash": body_hash})
    await connection.commit()


async def forget_keys(connection: AsyncConnection) -> int:
    """Delete keys that were taken more than a day ago, commit, and return how many."""
    deleted = await connection.execute(_CLEAN)
    await connection.commit()
    return deleted.rowcount
