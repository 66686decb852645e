"""A proxy that three tenants share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.keys.grants import Scope
from store.keys.keys import create_key
from store.tenants import DEFAULT
from store.updates.policies import ensure_base
from tests.integration.conftest import Proxy, proxy_with, settings_for
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
