"""Make API keys, show them, and wait until a proxy knows them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from store.keys import Scope, create_key
from tests.integration.conftest import Proxy
from tests.support.waiting import eventually

CALL = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


async def made(engine: AsyncEngine, name: str, *scopes: Scope) -> str:
    async with engine.begin() as connection:
        return (await create_key(connection, name, scopes)).key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(proxy: Proxy, path: str, headers: Mapping[str, str], port: str = "") -> int:
    """POST what the path takes, or GET from the admin port."""
    if port:
        async with proxy.session.get(f"{proxy.admin}{path}", headers=headers) as reply:
            return reply.status
    body: Any = {"value": 1, "episode": "e"} if path == "/feedback" else CALL
    async with proxy.session.post(f"{proxy.url}{path}", json=body, headers=headers) as reply:
        return reply.status


async def taken(proxy: Proxy, key: str) -> None:
    """Wait until the proxy knows a key, on both ports."""

    async def known() -> bool:
        seen = [
            await status(proxy, "/v1/embeddings", bearer(key)),
            await status(proxy, "/metrics", bearer(key), "admin"),
        ]
        # A port that has not seen the key yet may still be open to everybody.
        open_to_all = [
            await status(proxy, "/v1/embeddings", {}),
            await status(proxy, "/metrics", {}, "admin"),
        ]
        return 401 not in seen and open_to_all == [401, 401]

    await eventually(known)
