"""Define what workers know of API keys: hashes, scopes and limits."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final, Literal

from store.records import Record
from store.tenants import DEFAULT

KEY_PREFIX: Final = b"pawl_"
ID_BYTES: Final = 8

Scope = Literal["infer", "feedback", "read", "train", "admin"]
# What a key with the scope may be used for.
SCOPE_USES: Final[Mapping[Scope, str]] = {
    "infer": "calls",
    "feedback": "feedback",
    "read": "metrics, the console",
    "train": "moving traffic in the console",
    "admin": "the account at the provider, all tenants in the console",
}
SCOPES: Final[tuple[Scope, ...]] = tuple(SCOPE_USES)


class Limits(Record, frozen=True, kw_only=True):
    """Limits on a key's requests to each port of one proxy; None: no limit.

    `per_minute` requests may begin in any 60 seconds, and `at_once` may run at the same time. Once
    the calls that ended in the last 60 seconds took `tokens_per_minute` tokens, no other call may
    begin.
    """

    per_minute: int | None = None
    at_once: int | None = None
    tokens_per_minute: int | None = None


NO_LIMITS: Final = Limits()


class Grant(Limits, frozen=True, kw_only=True):
    """What a worker knows of a key: its name, its SHA-256, and what its bearer may do."""

    id: str
    hash: bytes
    scopes: tuple[Scope, ...]
    tenant: str = DEFAULT
    name: str = ""


class KeyRing(Record, frozen=True, kw_only=True):
    """The grants of all keys that are not revoked, and the tenants that ever had a key.

    `made` tells whether any key was ever made. `seen` is False in a proxy that has not reached the
    database yet: then the other fields are not known.
    """

    made: bool
    seen: bool = True
    grants: tuple[Grant, ...] = ()
    tenants: tuple[str, ...] = ()


def hash_of_key(key: bytes) -> bytes:
    """Return the hash by which a key is stored, 32 bytes."""
    return sha256(key).digest()
