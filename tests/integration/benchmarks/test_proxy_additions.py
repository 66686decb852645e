"""What `benchmarks.proxy --with` adds to a database is what its name says, and nothing else."""

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.proxy import wire
from benchmarks.proxy.additions import ADDITIONS, OTHER_KEYS
from store.keys import MARK, list_keys
from store.version_queries import list_versions


async def shares(engine: AsyncEngine) -> dict[int, tuple[str, float | None]]:
    """The state and the share of new episodes of each version of the policy that is called."""
    async with engine.connect() as connection:
        versions = await list_versions(connection, wire.MODEL)
    return {one.version: (one.state, one.share) for one in versions}


async def test_with_arms_the_same_version_serves_beside_a_canary_and_the_base_model(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        assert await ADDITIONS["arms"].without(connection) == wire.KEY
    assert await shares(engine) == {0: ("published", None), 1: ("serving", None)}
    async with engine.begin() as connection:
        await connection.exec_driver_sql("TRUNCATE policies, policy_events, updates CASCADE")
        assert await ADDITIONS["arms"].added(connection) == wire.KEY
    assert await shares(engine) == {
        0: ("published", 0.02),
        1: ("serving", None),
        2: ("canary", 0.1),
    }


@pytest.mark.parametrize(
    ("name", "tenant", "limited"),
    [("keys", "default", False), ("limits", "default", True), ("tenants", "bench", False)],
)
async def test_one_of_many_keys_calls(
    engine: AsyncEngine, name: str, tenant: str, limited: bool
) -> None:
    async with engine.begin() as connection:
        key = await ADDITIONS[name].added(connection)
        keys = {one.name: one for one in await list_keys(connection)}
    assert len(keys) == OTHER_KEYS + 1
    calling = keys["bench"]
    assert key.startswith(MARK.decode())
    assert calling.id in key
    assert (calling.tenant, calling.scopes) == (tenant, ("infer",))
    assert (calling.at_once is not None, calling.tokens_per_minute is not None) == (limited,) * 2


async def test_limits_and_tenants_are_compared_with_a_key_without(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        assert await ADDITIONS["keys"].without(connection) == wire.KEY
        assert not await list_keys(connection)
    assert {ADDITIONS[name].without for name in ("limits", "tenants")} == {ADDITIONS["keys"].added}


@pytest.mark.parametrize("name", sorted(ADDITIONS))
async def test_an_addition_has_no_more_policies_or_keys_than_it_says(
    engine: AsyncEngine, name: str
) -> None:
    async with engine.begin() as connection:
        await ADDITIONS[name].added(connection)
        has_versions = bool(await list_versions(connection, wire.MODEL))
        has_keys = bool(await list_keys(connection))
    assert (has_versions, has_keys) == (name == "arms", name in ("keys", "limits", "tenants"))
