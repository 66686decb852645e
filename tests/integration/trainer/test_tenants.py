"""A trainer works for the tenant that a policy began with, and for no other."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.tenants import DEFAULT, scoped
from store.version_queries import list_versions
from store.version_states import ensure_base
from tests.support.controller.replicas import write
from tests.support.ledger.episodes import ingest
from tests.support.ledger.totals import totals
from tests.support.records import call
from tests.support.trainer.policies import Policies
from trainer.errors import TrainerError
from trainer.metrics import LEFT_POLICY
from trainer.publishing.probe import ProbeRow
from trainer.updates.versions import begin_policy

FILE = Path("policies.toml")


@pytest.mark.parametrize("tenant", [DEFAULT, "b"])
@pytest.mark.parametrize("file", [FILE, None])
async def test_a_policy_that_began_with_a_tenant_is_refused_to_all_others(
    engine: AsyncEngine, tenant: str, file: Path | None
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "p", "m", "a")
    says = f"'p': tenant: it is '{tenant}', but the policy's records .* tenant 'a'.*another name"
    with pytest.raises(TrainerError, match=says) as refused:
        await begin_policy(engine, "p", "m", file, tenant)
    assert str(refused.value).startswith(str(file or "PAWL_POLICIES is not set"))
    await begin_policy(engine, "p", "m", file, "a")
    async with engine.connect() as connection:
        assert [one.tenant for one in await list_versions(connection, "p")] == ["a"]


async def test_a_policy_that_has_calls_of_a_tenant_is_refused_to_all_others(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await ingest(connection, [call(scoped("a", "e"), policy="p"), call("mine", policy="q")])
    for policy, tenant in (("p", DEFAULT), ("p", "b"), ("q", "a")):
        with pytest.raises(TrainerError, match="stay so"):
            await begin_policy(engine, policy, "m", FILE, tenant)
    async with engine.connect() as connection:
        assert await list_versions(connection) == []
    await begin_policy(engine, "p", "m", FILE, "a")
    await begin_policy(engine, "q", "m", FILE)


async def test_a_policy_with_calls_of_two_tenants_begins_for_neither(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        calls = [call(scoped(tenant, "e"), policy="p") for tenant in ("a", "b")]
        await ingest(connection, calls)
    for tenant in ("a", "b", DEFAULT):
        with pytest.raises(TrainerError, match="stay so"):
            await begin_policy(engine, "p", "m", FILE, tenant)


async def test_nothing_of_another_tenants_policy_is_trained(
    policies: Policies,
) -> None:
    probe = (ProbeRow(ids=(1, 2), logprobs=(-2.0,)),)
    async with policies.engine.begin() as connection:
        await ensure_base(connection, "checker", "m", "a")
        await write(connection, policies.folder, 1, "checker", probe)
    policies.fake.logprobs["checker@1"] = -2.0
    await policies.fill({"writer": 8, "checker": 8})
    # This trainer's policies are the default tenant's.
    assert await policies.turns(1) == ["checker", "writer"]
    assert LEFT_POLICY.labels("checker")._value.get() == 1
    # The controller publishes what any trainer has written.
    assert await policies.states() == {"checker@1": "serving", "writer@1": "serving"}
    async with policies.engine.connect() as connection:
        assert (await totals(connection)).consumed_episodes == 8


async def test_trainer_of_only_another_tenants_policy_ends_with_the_reason(
    policies: Policies,
) -> None:
    async with policies.engine.begin() as connection:
        await ensure_base(connection, "checker", "m", "a")
    await policies.fill({"checker": 8})
    async with policies.scheduler(["checker"]) as scheduler:
        with pytest.raises(TrainerError, match="of tenant 'a', and stay so"):
            await asyncio.wait_for(scheduler.run(0.01, once=True), 30)
    assert await policies.updates() == []
