"""Prepare a database for what is measured as an addition: API keys, say, or arms of a policy."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks.proxy import wire
from store.connection.engine import make_engine
from store.keys import NO_LIMITS, Limits, create_key
from store.schema.migrate import upgrade
from store.tenants import DEFAULT
from store.updates.claims import begin_update, consume
from store.version_queries import numbered_version
from store.version_states import begin_canary, ensure_base, make_candidate
from tests.support.ledger.lineage import promote

# Keys beside the one that calls: a look-up must not depend on how many there are.
OTHER_KEYS: Final = 1000
# Limits that are counted and never reached.
LIMITS: Final = Limits(at_once=10_000, tokens_per_minute=2_000_000_000)
CANARY_SHARE, BASE_SHARE = 0.1, 0.02
# Prepare a database, in one transaction; return the key to call with.
Prepare = Callable[[AsyncConnection], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Addition:
    """Define what is measured: databases without and with it, which are alike otherwise."""

    without: Prepare
    added: Prepare


def prepared(url: str, prepare: Prepare) -> str:
    """Bring a new database up to date and prepare it; return the key to call with."""

    async def run() -> str:
        await upgrade(url)
        engine = make_engine(url)
        try:
            async with engine.begin() as connection:
                return await prepare(connection)
        finally:
            await engine.dispose()

    return asyncio.run(run())


async def _nothing(_: AsyncConnection) -> str:
    """Leave all as it is: whoever calls from this machine may, whatever its key."""
    return wire.KEY


async def _key(connection: AsyncConnection) -> str:
    """Make keys, one of which calls."""
    return await _key_with(connection)


async def _limits(connection: AsyncConnection) -> str:
    """Make the same, with limits on calls at once and tokens."""
    return await _key_with(connection, limits=LIMITS)


async def _tenant(connection: AsyncConnection) -> str:
    """Make the same, of a tenant."""
    return await _key_with(connection, tenant="bench")


async def _key_with(
    connection: AsyncConnection, *, limits: Limits = NO_LIMITS, tenant: str = DEFAULT
) -> str:
    for number in range(OTHER_KEYS):
        await create_key(connection, f"other-{number}", ("infer",))
    return (await create_key(connection, "bench", ("infer",), limits, tenant)).key


async def _one_version(connection: AsyncConnection) -> str:
    """Begin a policy of which version 1 has all the traffic."""
    await ensure_base(connection, wire.MODEL)
    await _add_version(connection, 1, parent=0)
    await promote(connection, wire.MODEL, 1, reason="measured", actor="operator")
    return wire.KEY


async def _arms(connection: AsyncConnection) -> str:
    """Begin the same, with version 2 as a canary, and a share for the base model."""
    await _one_version(connection)
    await _add_version(connection, 2, parent=1)
    await make_candidate(connection, wire.MODEL, 2, {}, reason="measured")
    canary = await numbered_version(connection, wire.MODEL, 2)
    assert canary is not None
    await begin_canary(
        connection, canary, CANARY_SHARE, BASE_SHARE, reason="measured", actor="operator"
    )
    return wire.KEY


async def _add_version(connection: AsyncConnection, number: int, parent: int) -> None:
    update = await begin_update(connection, wire.MODEL, parent, {})
    await consume(
        connection, update, (), {}, policy=wire.MODEL, version=number, adapter_path=f"/m/{number}"
    )


ADDITIONS: Final[Mapping[str, Addition]] = {
    # How far apart two are that do the same.
    "nothing": Addition(_nothing, _nothing),
    "keys": Addition(_nothing, _key),
    "limits": Addition(_key, _limits),
    "tenants": Addition(_key, _tenant),
    "arms": Addition(_one_version, _arms),
}
