"""Tell which responses are those that an API keeps under their ids, to be gone on from."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

# Other APIs' replies may have any id, also one that their client chose.
_KNOWN: Final = text(
    "SELECT DISTINCT response_id FROM transitions"
    " WHERE response_id = ANY(:names) AND dialect = :dialect"
)


async def known_responses(
    connection: AsyncConnection, names: Sequence[str], dialect: str
) -> set[str]:
    """Return which of these ids, as kept for their tenants, calls of a wire format got."""
    rows = await connection.execute(_KNOWN, {"names": list(names), "dialect": dialect})
    return set(rows.scalars())
