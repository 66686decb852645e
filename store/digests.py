"""Digests of what calls offer and ask for: 16 bytes, the first of which is the kind (pure)."""

from collections.abc import Sequence
from typing import Any, Final

from asyncpg.pgproto import pgproto

# Ids of tool calls, and of responses. All that a call asks for of one kind counts together;
# of a conversation's prefixes (any other kind) the first asked for that is known counts.
TOOL_CALL: Final = 1
RESPONSE: Final = 2
PREFIX: Final = 3
_KINDS_OF_IDS: Final = (TOOL_CALL, RESPONSE)


def as_uuid(digest: bytes) -> Any:
    """A digest in the driver's own type for 16 bytes.

    Raises:
        ValueError: it is not 16 bytes long.
    """
    return pgproto.UUID(digest)


def levels(asks: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Each digest with how sure a sign it is, 0 the surest."""
    least = len(_KINDS_OF_IDS)
    return [
        (digest, digest[0] - 1 if digest[0] in _KINDS_OF_IDS else least + place)
        for place, digest in enumerate(asks)
    ]
