"""Create, list and revoke API keys, and read what the workers need to check them."""

from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import ColumnElement, select, text, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import BadKey, UnknownKey
from store.keys.grants import NO_LIMITS, Grant, Limits, Scope, check_name, check_tenant
from store.keys.secrets import hash_of, id_of, is_key, new_secret
from store.records import Record
from store.schema.keys import STANDING, api_keys
from store.tenants import DEFAULT

_SHOWN: Final = (
    api_keys.c.id,
    api_keys.c.name,
    api_keys.c.tenant,
    api_keys.c.scopes,
    api_keys.c.per_minute,
    api_keys.c.at_once,
    api_keys.c.tokens_per_minute,
    api_keys.c.created_at,
    api_keys.c.revoked_at,
)
_GRANTS: Final = select(*_SHOWN, api_keys.c.hash).order_by(api_keys.c.id)


class ApiKey(Record, frozen=True, kw_only=True):
    """Describe a key as it may be shown: all but its secret. `revoked_at` of None: it counts."""

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
    """Hold a key that was just made, with the secret, which is kept nowhere."""

    about: ApiKey
    key: str


class KeyRing(Record, frozen=True, kw_only=True):
    """Hold what the standing keys allow; `made` says whether there was ever a key."""

    made: bool
    grants: tuple[Grant, ...] = ()


async def create_key(
    connection: AsyncConnection,
    name: str,
    scopes: tuple[Scope, ...],
    limits: Limits = NO_LIMITS,
    tenant: str = DEFAULT,
) -> NewKey:
    """Make a key and keep its hash, in the caller's transaction.

    Raises:
        BadKey: the name cannot be a key's, a key that is not revoked has it, or the tenant cannot
            have such a key.
    """
    key_id, key = new_secret()
    row = {"id": key_id, "name": check_name(name), "hash": hash_of(key.encode())}
    row["tenant"] = check_tenant(tenant, scopes)
    made = await connection.execute(
        insert(api_keys)
        .values(row | {"scopes": list(scopes)} | msgspec.structs.asdict(limits))
        .on_conflict_do_nothing(index_elements=["name"], index_where=text("revoked_at IS NULL"))
        .returning(*_SHOWN)
    )
    first = made.first()
    if first is None:
        raise BadKey(f"there is a key {name} already: revoke it first, or choose another name")
    return NewKey(about=_shown(first), key=key)


async def list_keys(connection: AsyncConnection, tenant: str | None = None) -> list[ApiKey]:
    """Return all keys, or a tenant's, revoked ones too, oldest first."""
    query = select(*_SHOWN).where(_is_of(tenant))
    rows = await connection.execute(query.order_by(api_keys.c.created_at, api_keys.c.id))
    return [_shown(row) for row in rows]


async def revoke_key(connection: AsyncConnection, named: str, tenant: str | None = None) -> ApiKey:
    """Revoke the key with this name or id that is not revoked yet, in the caller's transaction.

    Raises:
        UnknownKey: there is no such key, or with `tenant` none of this tenant's.
    """
    revoked = await connection.execute(
        update(api_keys)
        .where((api_keys.c.name == named) | (api_keys.c.id == named))
        .where(api_keys.c.revoked_at.is_(None), _is_of(tenant))
        .values(revoked_at=text("now()"))
        .returning(*_SHOWN)
    )
    row = revoked.first()
    if row is None:
        raise UnknownKey(
            f"no key has the name or id {named!r:.80}, or it was revoked before; `pawl keys list` "
            "shows the keys"
        )
    return _shown(row)


async def tenant_of_key(connection: AsyncConnection, key: str | None) -> str:
    """Return the tenant whose names a client means that shows this key.

    None, and what is no key of Pawl's but a gateway's, show the proxy none.

    Raises:
        UnknownKey: the key is wrong or was revoked.
    """
    if key is None or not is_key(key):
        return DEFAULT
    query = select(api_keys.c.tenant).where(
        api_keys.c.id == id_of(key), api_keys.c.hash == hash_of(key.encode()), text(STANDING)
    )
    tenant: str | None = await connection.scalar(query)
    if tenant is None:
        raise UnknownKey(
            "PAWL_API_KEY is wrong or was revoked: set it to a key that `pawl keys list` shows as "
            "not revoked"
        )
    return tenant


async def key_ring(connection: AsyncConnection) -> KeyRing:
    """Return what the standing keys allow, and whether there was ever a key."""
    rows = (await connection.execute(_GRANTS)).all()
    standing = [row for row in rows if row.revoked_at is None]
    grants = [msgspec.convert(row, Grant, from_attributes=True) for row in standing]
    return KeyRing(made=bool(rows), grants=tuple(grants))


def _is_of(tenant: str | None) -> ColumnElement[bool]:
    return true() if tenant is None else api_keys.c.tenant == tenant


def _shown(row: object) -> ApiKey:
    return msgspec.convert(row, ApiKey, from_attributes=True)
