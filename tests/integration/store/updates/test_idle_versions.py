"""Which versions nobody has called for a while: found at once as it would be one by one."""

from random import Random

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.records import POLICY_STATES, UNSERVED
from store.updates.policies import ensure_base, idle_versions

IDLE_S = 100.0
VERSIONS = text(
    """
    WITH made AS (
        INSERT INTO updates (id, policy, parent_version, version, state, recipe)
        VALUES (uuidv7(), :name, 0, :version, 'done', '{}') RETURNING id)
    INSERT INTO policies (name, version, state, served_name, adapter_path, update_id, changed_at,
        files_deleted_at)
    SELECT :name, :version, :state, :name || '@' || CAST(:version AS integer), '/a', id,
        now() - make_interval(secs => :ago_s), CASE WHEN :deleted THEN now() END
    FROM made
    """
)
EPISODE = text(
    """
    INSERT INTO episodes (id, key, method, task_named, policy, policy_version, first_call_id,
        last_call_id, last_call_at)
    SELECT id, CAST(id AS text), 'header', false, :first, 0, id, id,
        now() - make_interval(secs => :ago_s)
    FROM (SELECT uuidv7() AS id) made RETURNING id
    """
)
CLAIM = text(
    """
    INSERT INTO episode_policies (episode_id, policy, own_version, version, failed, last_call_at,
        claimable)
    VALUES (:episode, :policy, CAST(:version AS integer), 0, false, now(), true)
    """
)
ONE_BY_ONE = text(
    """
    SELECT p.version FROM policies p WHERE p.name = :name AND p.state = :state
        AND p.version > 0 AND p.files_deleted_at IS NULL
        AND p.changed_at < now() - make_interval(secs => :idle_s)
        AND NOT EXISTS (SELECT FROM episodes e JOIN episode_policies s
            ON s.episode_id = e.id AND s.policy = p.name AND s.own_version = p.version
            WHERE e.last_call_at > now() - make_interval(secs => :idle_s))
    """
)


async def fill(connection: AsyncConnection, draw: Random) -> None:
    """Versions of two policies in all states, and episodes that one or both of them served."""
    for name in ("m", "n"):
        await ensure_base(connection, name)
        for version in range(1, 9):
            state = draw.choice([one for one in POLICY_STATES if one != "serving"])
            values = {"name": name, "version": version, "state": state}
            values |= {"ago_s": draw.choice([0.0, 2 * IDLE_S])}
            values |= {"deleted": state in UNSERVED and draw.random() < 0.3}
            await connection.execute(VERSIONS, values)
    for _ in range(draw.randint(0, 8)):
        episode = {"first": draw.choice("mn"), "ago_s": draw.choice([0.0, 2 * IDLE_S])}
        made = await connection.scalar(EPISODE, episode)
        for policy in draw.sample("mn", draw.randint(1, 2)):
            version = draw.choice([None, *range(9)])
            await connection.execute(CLAIM, {"episode": made, "policy": policy, "version": version})


@pytest.mark.parametrize("seed", range(20))
async def test_all_at_once_is_one_by_one(engine: AsyncEngine, seed: int) -> None:
    async with engine.begin() as connection:
        await fill(connection, Random(seed))
        for name in ("m", "n", "nobody"):
            found = await idle_versions(connection, name, POLICY_STATES, IDLE_S)
            alone: list[int] = []
            for state in POLICY_STATES:
                values = {"name": name, "state": state, "idle_s": IDLE_S}
                alone += (await connection.execute(ONE_BY_ONE, values)).scalars()
            assert [version.version for version in found] == sorted(alone)


async def test_there_are_idle_versions_and_others(engine: AsyncEngine) -> None:
    """The draws above tell the two apart."""
    async with engine.begin() as connection:
        await fill(connection, Random(0))
        found = await idle_versions(connection, "m", POLICY_STATES, IDLE_S)
    assert 0 < len(found) < 8
