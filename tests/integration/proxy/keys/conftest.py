"""Share a proxy between three tenants, and ask it as each of them."""

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.keys import Scope, create_key
from store.records import Episode
from store.tenants import DEFAULT, tenant_of
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, Reply, proxy_with, settings_for
from tests.support.proxy.keys import bearer, taken
from tests.support.servers.fake_upstream import FakeUpstream

FILE = """
[[policy]]
name = "a-writes"
tenant = "a"
base = "m"
agents = ["writer"]
models = ["writes"]

[[policy]]
name = "b-writes"
tenant = "b"
base = "m"
agents = ["writer"]
models = ["writes"]

[[policy]]
name = "m"
base = "m"
"""
PUBLISHED = (
    "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
    " SELECT uuidv7(), name, 0, 1, 'done', '{}' FROM policies",
    "INSERT INTO policies (name, version, state, served_name, update_id)"
    " SELECT policy, 1, 'published', policy || '@1', id FROM updates",
    "UPDATE policies p SET tenant = b.tenant FROM policies b"
    " WHERE b.name = p.name AND b.version = 0",
)
EVERYONE = ("a", "b", DEFAULT)


async def key_of(engine: AsyncEngine, tenant: str, *scopes: Scope) -> str:
    name = f"{tenant}-{'-'.join(scopes)}"
    async with engine.begin() as connection:
        return (await create_key(connection, name, scopes, tenant=tenant)).key


@pytest.fixture
async def shared(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy for the tenants a, b and the default one; each has a policy with a version 1."""
    async with engine.begin() as connection:
        for policy, tenant in (("a-writes", "a"), ("b-writes", "b"), ("m", DEFAULT)):
            await ensure_base(connection, policy, "m", tenant)
        for statement in PUBLISHED:
            await connection.execute(text(statement))
    upstream.models = ["m", "a-writes@1", "b-writes@1", "m@1"]
    path = tmp_path / "policies.toml"
    path.write_text(FILE)
    settings = settings_for(database_url, upstream.url, tmp_path)
    async with proxy_with(settings.model_copy(update={"policies": path}), engine) as proxy:
        yield proxy


Headers = dict[str, Mapping[str, str]]


@pytest.fixture
async def keys(shared: Proxy, engine: AsyncEngine, upstream: FakeUpstream) -> Headers:
    """Make a key for each tenant: the headers that its requests show."""
    made = {one: await key_of(engine, one, "infer", "feedback", "read") for one in EVERYONE}
    for key in made.values():
        await taken(shared, key)
    # What was asked to see whether the keys are known.
    upstream.other.clear()
    return {tenant: bearer(key) for tenant, key in made.items()}


async def ask(proxy: Proxy, method: str, path: str, key: Mapping[str, str], **body: Any) -> Reply:
    url, json = f"{proxy.url}{path}", body or None
    async with proxy.session.request(method, url, json=json, headers=key) as reply:
        return Reply(reply.status, reply.headers, await reply.read())


def by_tenant(found: list[Episode]) -> dict[str, list[Episode]]:
    return {one: [e for e in found if tenant_of(e.key) == one] for one in EVERYONE}


def about(reply: Reply, name: str) -> tuple[int, bytes]:
    """Return status and body, but for the name that was asked for and the call's id."""
    return reply.status, re.sub(rb"[0-9a-f-]{36}", b"", reply.body.replace(name.encode(), b"X"))
