"""Make API keys, show them, and wait until a proxy knows them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from store.grants import NO_LIMITS, Limits, Scope
from store.keys import create_key
from store.tenants import DEFAULT
from tests.integration.conftest import Proxy
from tests.support.waiting import eventually

CALL = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


async def made(
    engine: AsyncEngine,
    name: str,
    *scopes: Scope,
    limits: Limits = NO_LIMITS,
    tenant: str = DEFAULT,
) -> str:
    async with engine.begin() as connection:
        return (await create_key(connection, name, scopes, limits, tenant)).key


async def key_of(engine: AsyncEngine, tenant: str, *scopes: Scope) -> str:
    return await made(engine, f"{tenant}-{'-'.join(scopes)}", *scopes, tenant=tenant)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(proxy: Proxy, path: str, headers: Mapping[str, str], port: str = "") -> int:
    """POST what the path takes, or GET from the admin port."""
    if port:
        return (await proxy.admin_page(path, headers)).status
    body: Any = {"value": 1, "episode": "e"} if path == "/feedback" else CALL
    return (await proxy.ask("POST", path, headers, **body)).status


async def taken(proxy: Proxy, key: str) -> None:
    """Wait until the proxy knows a key, on both ports."""

    async def known() -> bool:
        # A port that has not seen the key yet may still be open to everybody.
        seen, open_to_all = [
            [
                await status(proxy, "/v1/embeddings", headers),
                await status(proxy, "/metrics", headers, "admin"),
            ]
            for headers in (bearer(key), {})
        ]
        return 401 not in seen and open_to_all == [401, 401]

    await eventually(known)
