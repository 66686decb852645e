"""Name what is deleted without keeping the names: a digest of each is its tombstone (pure).

Episodes go by their key, calls and responses by their id, as in feedback. Names are as they are
kept (`store.tenants`), so that a tenant's tombstones are no other's.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from hashlib import sha256
from typing import Final
from uuid import UUID

import msgspec

from store.records import CallRecord, FeedbackRecord, GapRecord, SpoolRecord, TargetKind
from store.tenants import same_tenant

# A kind of target, and a name of that kind.
Named = tuple[TargetKind, str]
# What a deleted episode's row has in place of its key, before the digest. No client can name an
# episode so: names are printable.
PREFIX: Final = "\x1fdeleted:"


def digest_of(kind: TargetKind, name: str) -> UUID:
    """Return the tombstone of a name: the first 16 bytes of a SHA-256."""
    hashed = f"{kind}\0{name}".encode(errors="surrogatepass")
    return UUID(bytes=sha256(hashed).digest()[:16])


def key_once_deleted(key: str) -> str:
    """Return what a deleted episode's row has in place of its key."""
    return f"{PREFIX}{digest_of('episode', key).hex}"


def names_in(record: SpoolRecord) -> Iterator[Named]:
    """Yield the names by which it is known whether a record, or a part of it, is deleted.

    A lapse names nothing.
    """
    if isinstance(record, CallRecord):
        yield "episode", record.episode
    elif isinstance(record, GapRecord):
        yield from (("episode", key) for key in record.episodes)
    elif isinstance(record, FeedbackRecord):
        yield from names_in_feedback(record)


def names_in_feedback(record: FeedbackRecord) -> list[Named]:
    """Return the targets of a POST of feedback."""
    return [(item.target_kind, item.target) for item in record.items]


def names_of(call: CallRecord) -> list[Named]:
    """Return the names that later records may have for a call alone."""
    names: list[Named] = [("call", same_tenant(call.episode, str(call.id)))]
    if call.response_id is not None:
        names.append(("response", call.response_id))
    return names


def digests(names: Iterable[Named]) -> set[UUID]:
    """Return the tombstones of names."""
    return {digest_of(kind, name) for kind, name in names}


def keys_left(keys: Sequence[str], deleted: Set[UUID]) -> tuple[str, ...]:
    """Return the keys of episodes that are not deleted."""
    return tuple(key for key in keys if digest_of("episode", key) not in deleted)


def without_deleted(record: SpoolRecord, deleted: Set[UUID]) -> SpoolRecord | None:
    """Return what is left of a record without the deleted names; None: nothing is.

    One POST of feedback, and one mark of lost calls, may be about several episodes.
    """
    if isinstance(record, CallRecord):
        return record if keys_left([record.episode], deleted) else None
    if isinstance(record, GapRecord):
        keys = keys_left(record.episodes, deleted)
        return msgspec.structs.replace(record, episodes=keys) if keys else None
    if isinstance(record, FeedbackRecord):
        return feedback_without(record, deleted)
    return record


def feedback_without(record: FeedbackRecord, deleted: Set[UUID]) -> FeedbackRecord | None:
    """Return what is left of a POST of feedback; None: nothing is."""
    items = tuple(
        item for item in record.items if digest_of(item.target_kind, item.target) not in deleted
    )
    return msgspec.structs.replace(record, items=items) if items else None
