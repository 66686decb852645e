"""Keep the idempotency keys of feedback, shared by all proxies of one database.

A body takes its key here when it is accepted; it is stored later, maybe much later
(`store.write.ingest`). Keys that were taken are deleted after a day. Keys of stored bodies are
kept (docs/decisions/031-idempotency-across-workers.md).
"""

from enum import Enum
from typing import Any, Final

KEEP: Final = "1 day"

_STORED: Final = "SELECT body_hash FROM feedback_requests WHERE idempotency_key = $1"
# The update changes nothing, but it makes the later of two concurrent requests wait for the first,
# and returns the first's body hash to it.
_TAKE: Final = """
    INSERT INTO feedback_keys (idempotency_key, body_hash) VALUES ($1, $2)
    ON CONFLICT (idempotency_key) DO UPDATE SET idempotency_key = excluded.idempotency_key
    RETURNING body_hash
"""
_GIVE_BACK: Final = "DELETE FROM feedback_keys WHERE idempotency_key = $1 AND body_hash = $2"
_CLEAN: Final = f"""
    WITH deleted AS (DELETE FROM feedback_keys WHERE at < now() - interval '{KEEP}' RETURNING 1)
    SELECT count(*) FROM deleted
"""


class KeyState(Enum):
    """Tell who owns a key: the same body, stored already; the same body, not stored; another."""

    STORED = "stored"
    OWN = "own"
    ANOTHERS = "another's"


async def take_key(driver: Any, key: str, body_hash: str) -> KeyState:
    """Take a key for a body unless another body has it."""
    stored = {row[0] for row in await driver.fetch(_STORED, key)}
    if stored:
        return KeyState.STORED if body_hash in stored else KeyState.ANOTHERS
    taken = await driver.fetchval(_TAKE, key, body_hash)
    return KeyState.OWN if taken == body_hash else KeyState.ANOTHERS


async def give_key_back(driver: Any, key: str, body_hash: str) -> None:
    """Free a key whose body was not accepted after all."""
    await driver.execute(_GIVE_BACK, key, body_hash)


async def forget_keys(driver: Any) -> int:
    """Delete keys that were taken more than a day ago, and return how many."""
    forgotten: int = await driver.fetchval(_CLEAN)
    return forgotten
