"""Compute the fingerprints that calls provide and need: 16 bytes, the first is the kind (pure).

The proxy makes them (`proxy.identity.call_memory`), the store matches them (`store.link.settle`).
"""

from collections.abc import Sequence
from typing import Any, Final

from asyncpg.pgproto import pgproto

from store.records import EVAL, Split

# Kinds. All ids of one kind (tool calls, responses) that a call needs count together. Of the
# prefixes of a conversation (any other kind) only the first that the database knows counts.
TOOL_CALL: Final = 1
RESPONSE: Final = 2
PREFIX: Final = 3
_KINDS_OF_IDS: Final = (TOOL_CALL, RESPONSE)
# The digests of evaluation are stored with this bit of the first byte set, so that each split's are
# matched and counted apart.
_OF_EVAL: Final = 0x80
# The SQL of a stored digest's twin, which is the same digest in the other split.
TWIN_SQL: Final = (
    "CAST(translate(left({0}::text, 1), '0123456789abcdef', '89abcdef01234567')"
    " || substr({0}::text, 2) AS uuid)"
)
# Added to the level of a match across splits: any match within a split is surer.
ACROSS_SPLITS: Final = 1 << 16
# Prefixes match across splits only where a call of training repeats an evaluation's: evaluation may
# well repeat recorded conversations of training, which stay training's.
MATCHES_SQL: Final = (
    f"(VALUES (n.digest, n.level, true), ({TWIN_SQL.format('n.digest')}, n.level + {ACROSS_SPLITS},"
    f" n.level < {len(_KINDS_OF_IDS)} OR n.digest < '80000000-0000-0000-0000-000000000000'))"
    " AS d (digest, level, counts)"
)


def as_uuid(digest: bytes, split: Split) -> Any:
    """Return a digest as stored for a split, in the driver's UUID type: less memory than Python's.

    Raises:
        ValueError: `digest` is not 16 bytes long.
    """
    if split == EVAL and digest:
        digest = bytes([digest[0] | _OF_EVAL]) + digest[1:]
    return pgproto.UUID(digest)


def digest_levels(needs: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Pair each digest with its level: 0 is the surest evidence, higher levels are weaker."""
    least = len(_KINDS_OF_IDS)
    return [
        (digest, digest[0] - 1 if digest[0] in _KINDS_OF_IDS else least + place)
        for place, digest in enumerate(needs)
    ]
