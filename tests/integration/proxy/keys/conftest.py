"""Share a proxy between three tenants, and ask it as each of them."""

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import Episode
from store.tenants import DEFAULT, tenant_of
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, Reply, StartProxy
from tests.support.ledger.lineage import set_state, trained
from tests.support.proxy.keys import bearer, key_of, taken
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
EVERYONE = ("a", "b", DEFAULT)


@pytest.fixture
async def shared(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy for the tenants a, b and the default one; each has a policy with a version 1."""
    async with engine.begin() as connection:
        for policy, tenant in (("a-writes", "a"), ("b-writes", "b"), ("m", DEFAULT)):
            await ensure_base(connection, policy, "m", tenant)
            await trained(connection, 0, name=policy)
            await set_state(connection, policy, 1, "retired")
    upstream.models = ["m", "a-writes@1", "b-writes@1", "m@1"]
    path = tmp_path / "policies.toml"
    path.write_text(FILE)
    async with start_proxy(policies=path) as proxy:
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


def by_tenant(found: list[Episode]) -> dict[str, list[Episode]]:
    return {one: [e for e in found if tenant_of(e.key) == one] for one in EVERYONE}


def about(reply: Reply, name: str) -> tuple[int, bytes]:
    """Return status and body, but for the name that was asked for and the call's id."""
    return reply.status, re.sub(rb"[0-9a-f-]{36}", b"", reply.body.replace(name.encode(), b"X"))
