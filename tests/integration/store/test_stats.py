"""What a summary counts of each policy."""

from sqlalchemy.ext.asyncio import AsyncEngine

from store.claim_query import ClaimRule
from store.read.stats import PolicyTotals, policy_totals
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward


async def test_totals_count_each_policys_calls_failures_and_trained_episodes(
    engine: AsyncEngine,
) -> None:
    writer = {"policy": "writer", "policy_version": 0}
    fixed = {"policy": "checker", "trainable": False, "reason": "fixed_policy"}
    records = [
        call("e", task="t", **writer),
        call("e", task="t", **fixed),
        call("f", task="t", **writer | {"http_status": 400}),
        call("f", task="t", **writer | {"status": "upstream_error", "http_status": None}),
        call("f", task="t", **writer | {"trainable": False, "reason": "side", "side": "title"}),
        call("f", task="t", policy=None, trainable=False, reason="no_policy"),
        reward(1.0, episode="e"),
    ]
    await Ingester().store(engine, records)
    async with engine.begin() as connection:
        await ensure_base(connection, "writer")
    rule = ClaimRule(policy="writer", group_size=1, groups=1, max_age_s=1e9)
    claim = await claimed(engine, rule)
    assert claim is not None
    await consume_all(engine, claim, version=1)
    async with engine.connect() as connection:
        found = {one.policy: one for one in await policy_totals(connection)}
    assert set(found) == {"writer", "checker", None}
    assert found["writer"] == PolicyTotals(
        policy="writer",
        calls=4,
        side_calls=1,
        trainable_calls=3,
        failed_calls=2,
        versions=1,
        trained_episodes=1,
    )
    assert found["checker"].calls == 1
    assert found["checker"].trainable_calls == 0
    assert (found[None].calls, found[None].trained_episodes) == (1, 0)
