"""Fingerprints that calls provide and need: digests of 16 bytes, the first is the kind (pure).

The proxy makes them (`proxy.identity.fingerprints`), the store matches them (`store.link.settle`).
"""

from collections.abc import Sequence
from typing import Any, Final

from asyncpg.pgproto import pgproto

# Kinds. All ids of one kind (tool calls, responses) that a call needs count together. Of the
# prefixes of a conversation (any other kind) only the first one that is known counts.
TOOL_CALL: Final = 1
RESPONSE: Final = 2
PREFIX: Final = 3
_KINDS_OF_IDS: Final = (TOOL_CALL, RESPONSE)


def as_uuid(digest: bytes) -> Any:
    """Return a digest as the driver's own UUID type, the smallest column type of 16 bytes.

    Raises:
        ValueError: it is not 16 bytes long.
    """
    return pgproto.UUID(digest)


def levels(needs: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Pair each digest with its level: 0 is the surest evidence, higher ones are weaker."""
    least = len(_KINDS_OF_IDS)
    return [
        (digest, digest[0] - 1 if digest[0] in _KINDS_OF_IDS else least + place)
        for place, digest in enumerate(needs)
    ]
