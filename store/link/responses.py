"""Tell whether a response is one that an API keeps under its id, to be gone on from."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

# Other APIs' replies may have any id, also one that their client chose.
_KNOWN: Final = text(
    "SELECT EXISTS (SELECT FROM transitions WHERE response_id = :name AND dialect = :dialect)"
)


async def is_response(connection: AsyncConnection, name: str, dialect: str) -> bool:
    """Return whether a call of an API got a response with this id.

    Args:
        connection: an open connection.
        name: the id, as it is kept for its tenant.
        dialect: the wire format that the API speaks.
    """
    known = await connection.scalar(_KNOWN, {"name": name, "dialect": dialect})
    return bool(known)
