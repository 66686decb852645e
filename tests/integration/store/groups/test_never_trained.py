"""What can never be trained any more: stale or aged episodes are spent with a reason."""

from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claims import oldest_version
from store.ready import ClaimRule
from tests.integration.store.test_groups import (
    LONG_AGO,
    SINGLE,
    episode,
    expired,
    fields,
    keys,
    reasons,
    versions,
)
from tests.support.ledger.updates import claimed

# What can never be trained any more

LIMITED = ClaimRule(**fields(SINGLE, max_staleness=1, max_episode_age_s=1800.0))


async def test_stale_and_aged_episodes_are_spent_with_a_reason(engine: AsyncEngine) -> None:
    await versions(engine, "published", "published", "serving")
    await episode(engine, "stale", 1.0, policy_version=1)
    await episode(engine, "stale, unscored", policy_version=0)
    await episode(engine, "fresh", 1.0, policy_version=2)
    await episode(engine, "open", policy_version=3)
    assert await expired(engine, LIMITED, parent=3) == {"stale": 2}
    assert await expired(engine, LIMITED, parent=3) == {}
    assert await reasons(engine) == {"stale": "stale", "stale, unscored": "stale"}
    async with engine.connect() as connection:
        [*_, last] = await claims.list_updates(connection, "m")
    assert (last.state, last.version) == ("expired", None)
    assert last.metrics["dropped"] == {"stale": 2}


async def test_stale_ones_are_not_claimed_even_before_they_are_spent(engine: AsyncEngine) -> None:
    await versions(engine, "published", "published", "serving")
    await episode(engine, "stale", 1.0, policy_version=1)
    rule = ClaimRule(**fields(LIMITED, max_age_s=1e-6))
    assert await claimed(engine, rule, parent=3) is None


async def test_age_counts_from_the_last_call(engine: AsyncEngine) -> None:
    # An episode's age is that of its id, which is its first call's.
    old = UUID("017f22e2-79b0-7cc3-98c4-dc0c0c07398f")
    await episode(engine, "old", 1.0, id=old, started_at=LONG_AGO)
    await episode(engine, "new", 1.0)
    async with engine.begin() as connection:
        await connection.execute(text("DELETE FROM feedback"))
    assert await expired(engine, LIMITED) == {"aged": 1}
    assert await reasons(engine) == {"old": "aged"}


async def test_without_limits_nothing_is_ever_spent(engine: AsyncEngine) -> None:
    await versions(engine, *["published"] * 9)
    await episode(engine, "old", 1.0, started_at=LONG_AGO)
    assert await expired(engine, SINGLE, parent=9) == {}


async def test_rejected_versions_make_nobody_stale(engine: AsyncEngine) -> None:
    await versions(engine, "published", "rejected", "rejected", "rejected", "serving")
    async with engine.connect() as connection:
        found = [await oldest_version(connection, "m", 5, staleness) for staleness in (0, 1, 2, 9)]
        unlimited = await oldest_version(connection, "m", 5, None)
    assert found == [5, 1, 0, 0]
    assert unlimited == 0


async def test_what_is_in_doubt_or_claimed_is_not_spent(engine: AsyncEngine) -> None:
    await versions(engine, "published", "serving")
    await episode(engine, "doubtful", 1.0, policy_version=0, confidence="doubtful")
    await episode(engine, "claimed", 1.0, policy_version=0)
    assert keys(await claimed(engine, ClaimRule(**fields(SINGLE, groups=1)), parent=2)) == [
        "claimed"
    ]
    rule = ClaimRule(**fields(SINGLE, max_staleness=0))
    assert await expired(engine, rule, parent=2) == {}
