"""Make, list, revoke and look up API keys.

A key is `pawl_ID_SECRET`: a public id and 256 random bits. Only its SHA-256 is stored; such a
secret needs no slower hash (docs/decisions/066-keys.md).
"""

import re
import secrets
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import ColumnElement, func, or_, select, text, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import BadKey, UnknownKey
from store.grants import (
    ID_BYTES,
    KEY_PREFIX,
    NO_LIMITS,
    SCOPES,
    Grant,
    KeyRing,
    Limits,
    Scope,
    hash_of_key,
)
from store.records import Record
from store.schema.tables import NOT_REVOKED, api_keys
from store.tenants import DEFAULT, PATTERN

SECRET_BYTES: Final = 32

# No name looks like a key's id: `pawl keys revoke` takes a name or an id.
_NAME: Final = re.compile(r"(?![0-9a-f]{16}\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_TENANT: Final = re.compile(rf"{PATTERN}\Z")


class ApiKey(Record, frozen=True, kw_only=True):
    """A key without its secret, as commands show it. `revoked_at` is None while it is valid."""

    id: str
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    per_minute: int | None
    at_once: int | None
    tokens_per_minute: int | None
    created_at: datetime
    revoked_at: datetime | None = None


class NewKey(Record, frozen=True, kw_only=True):
    """A key that was just made: `key` is the whole key with its secret, which is not stored."""

    about: ApiKey
    key: str


_COLUMNS: Final = tuple(api_keys.c[name] for name in ApiKey.__struct_fields__)


def new_secret() -> tuple[str, str]:
    """Return a new key's public id, and the whole key."""
    key_id = secrets.token_hex(ID_BYTES)
    return key_id, f"{KEY_PREFIX.decode()}{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def id_in_key(key: str) -> str:
    """Return the public id in a key."""
    return key[len(KEY_PREFIX) : len(KEY_PREFIX) + 2 * ID_BYTES]


def check_name(name: str) -> str:
    """Return `name` if a key can have this name.

    Raises:
        BadKey: it cannot.
    """
    if _NAME.match(name) is None:
        raise BadKey(
            f"{name!r:.80} cannot be the name of a key: use 1 to 64 letters, digits, dots, dashes "
            "and underscores, begin with a letter or digit, and do not make it look like a key's id"
        )
    return name


def check_tenant(tenant: str, scopes: tuple[Scope, ...]) -> str:
    """Return `tenant` if a key of this tenant can have these scopes.

    Raises:
        BadKey: the name cannot be a tenant's, or its keys cannot have one of the scopes.
    """
    if _TENANT.match(tenant) is None:
        raise BadKey(
            f"{tenant!r:.80} cannot be the name of a tenant: use 1 to 64 letters, digits, dots, "
            "dashes and underscores, and begin with a letter or digit"
        )
    if tenant != DEFAULT and "admin" in scopes:
        raise BadKey(
            f"a key of tenant {tenant} cannot be for admin, which manages what all tenants share: "
            f"leave the scope out, or make the key without --tenant"
        )
    return tenant


def parse_scopes(listed: str) -> tuple[Scope, ...]:
    """Return the scopes in a comma-separated list, each once, in the order of `SCOPES`.

    Raises:
        BadKey: there are none, or one is unknown.
    """
    names = {name.strip() for name in listed.split(",") if name.strip()}
    unknown = sorted(names - set(SCOPES))
    if unknown or not names:
        reason = f"unknown scope {unknown[0]!r:.40}" if unknown else "a key needs a scope"
        raise BadKey(f"{reason}; scopes are {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in names)


async def create_key(
    connection: AsyncConnection,
    name: str,
    scopes: tuple[Scope, ...],
    limits: Limits = NO_LIMITS,
    tenant: str = DEFAULT,
) -> NewKey:
    """Make a key and store its hash, in the caller's transaction.

    Raises:
        BadKey: the name is invalid, or an unrevoked key has it, or the tenant cannot have such a
            key.
    """
    key_id, key = new_secret()
    row = {"id": key_id, "name": check_name(name), "hash": hash_of_key(key.encode())}
    row["tenant"] = check_tenant(tenant, scopes)
    inserted = await connection.execute(
        insert(api_keys)
        .values(row | {"scopes": list(scopes)} | msgspec.structs.asdict(limits))
        .on_conflict_do_nothing(index_elements=["name"], index_where=text("revoked_at IS NULL"))
        .returning(*_COLUMNS)
    )
    first = inserted.first()
    if first is None:
        raise BadKey(f"there is a key {name} already: revoke it first, or choose another name")
    return NewKey(about=_as_api_key(first), key=key)


async def list_keys(connection: AsyncConnection, tenant: str | None = None) -> list[ApiKey]:
    """Return the keys of `tenant` (None: of all tenants), oldest first, revoked ones included."""
    query = select(*_COLUMNS).where(_is_of_tenant(tenant))
    rows = await connection.execute(query.order_by(api_keys.c.created_at, api_keys.c.id))
    return [_as_api_key(row) for row in rows]


async def revoke_key(
    connection: AsyncConnection, name_or_id: str, tenant: str | None = None
) -> ApiKey:
    """Revoke the valid key with this name or id, in the caller's transaction.

    Raises:
        UnknownKey: there is no such key, or it is not a key of `tenant` (None: of any).
    """
    revoked = await connection.execute(
        update(api_keys)
        .where((api_keys.c.name == name_or_id) | (api_keys.c.id == name_or_id))
        .where(api_keys.c.revoked_at.is_(None), _is_of_tenant(tenant))
        .values(revoked_at=text("now()"))
        .returning(*_COLUMNS)
    )
    row = revoked.first()
    if row is None:
        raise UnknownKey(
            f"no key has the name or id {name_or_id!r:.80}, or it was revoked before; "
            "`pawl keys list` shows the keys"
        )
    return _as_api_key(row)


async def tenant_of_key(connection: AsyncConnection, key: str | None) -> str:
    """Return the tenant of an API key; the default tenant for None and for a key not of Pawl's.

    Raises:
        UnknownKey: the key is wrong or was revoked.
    """
    if key is None or not key.startswith(KEY_PREFIX.decode()):
        return DEFAULT
    query = select(api_keys.c.tenant).where(
        api_keys.c.id == id_in_key(key),
        api_keys.c.hash == hash_of_key(key.encode()),
        text(NOT_REVOKED),
    )
    tenant: str | None = await connection.scalar(query)
    if tenant is None:
        raise UnknownKey(
            "PAWL_API_KEY is wrong or was revoked: set it to a key that `pawl keys list` shows as "
            "not revoked"
        )
    return tenant


async def key_ring(connection: AsyncConnection, hash_: bytes | None = None) -> KeyRing:
    """Return the grants of the keys that are not revoked, and whether a key was ever made.

    With `hash_`, the only keys read are the one with this hash, and the oldest, which shows that
    a key was made.
    """
    query = select(*_COLUMNS, api_keys.c.hash).order_by(api_keys.c.id)
    if hash_ is not None:
        first = select(func.min(api_keys.c.id)).scalar_subquery()
        query = query.where(or_(api_keys.c.hash == hash_, api_keys.c.id == first))
    rows = (await connection.execute(query)).all()
    valid = [row for row in rows if row.revoked_at is None]
    grants = [msgspec.convert(row, Grant, from_attributes=True) for row in valid]
    tenants = tuple(sorted({row.tenant for row in rows}))
    return KeyRing(made=bool(rows), grants=tuple(grants), tenants=tenants)


def _is_of_tenant(tenant: str | None) -> ColumnElement[bool]:
    return true() if tenant is None else api_keys.c.tenant == tenant


def _as_api_key(row: object) -> ApiKey:
    return msgspec.convert(row, ApiKey, from_attributes=True)
