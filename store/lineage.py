"""Follow which version was trained from which: descendants, ancestors, and what failed among them.

An update makes a version from its parent. Nothing that was trained on from a failed version may
serve: it may have learned what that one was rolled back for. An import has version 0 as its parent.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema.trained import KL_TO_BASE
from store.versions import PolicyState, PolicyVersion, version_of

# The versions `of` a condition with all their descendants, as the table `built`.
DESCENDANTS: Final = """
    WITH RECURSIVE built AS (
        SELECT version FROM policies WHERE name = :name AND {of}
        UNION
        SELECT u.version FROM updates u JOIN built ON u.parent_version = built.version
        WHERE u.policy = :name AND u.version IS NOT NULL)
"""
# A version that failed: it was rolled back, ended by a retraining, or rejected by its replay. One
# that made way for a newer one did not fail.
_FAILED: Final = """
    (policies.rolled_back_at IS NOT NULL OR policies.ended_at IS NOT NULL
        OR policies.state = 'rejected' AND EXISTS (
        SELECT FROM policy_events v WHERE v.name = policies.name AND v.version = policies.version
            AND v.to_state = 'rejected' AND jsonb_exists(v.evidence, 'replay')))
"""
# A version and what it was trained on from, back to the first that a server has loaded: a candidate
# of several updates consists of these.
_CHAIN: Final = """
    WITH RECURSIVE chain AS (
        SELECT version, parent_version FROM updates WHERE policy = :name AND version = :version
        UNION
        SELECT u.version, u.parent_version FROM chain
            JOIN policies p ON p.name = :name AND p.version = chain.parent_version
            JOIN updates u ON u.id = p.update_id
        WHERE p.state = 'written')
"""
_DESCENDANTS_OF: Final = text(
    f"""
    {DESCENDANTS.format(of="version = :version")}
    SELECT p.* FROM policies p JOIN built USING (version)
    WHERE p.name = :name AND p.version <> :version AND p.state = ANY(CAST(:states AS text[]))
    ORDER BY p.version FOR NO KEY UPDATE OF p
    """
)
_HEAD: Final = text(
    f"""
    {DESCENDANTS.format(of=_FAILED)}
    SELECT p.* FROM policies p
    WHERE p.name = :name AND p.version NOT IN (SELECT version FROM built)
        AND (p.version = 0 OR p.state IN ('written', 'ready', 'candidate', 'canary', 'serving'))
    ORDER BY p.version DESC LIMIT 1
    """
)
_FAILED_ANCESTOR: Final = text(
    f"""
    WITH RECURSIVE chain AS (
        SELECT CAST(:version AS integer) AS version
        UNION
        SELECT u.parent_version FROM chain JOIN updates u
            ON u.policy = :name AND u.version = chain.version)
    SELECT policies.* FROM policies JOIN chain USING (version)
    WHERE policies.name = :name AND {_FAILED} ORDER BY version LIMIT 1
    """
)
_UNLOADED_ANCESTORS: Final = text(
    f"""
    {_CHAIN}
    SELECT p.*, (SELECT CAST(u.metrics ->> '{KL_TO_BASE}' AS float) FROM updates u
        WHERE u.id = p.update_id) AS {KL_TO_BASE}
    FROM policies p JOIN chain USING (version)
    WHERE p.name = :name AND p.version < :version ORDER BY p.version DESC
    """
)
_UPDATES_SINCE_LOADED: Final = text(f"{_CHAIN} SELECT count(*) FROM chain")
# A version has several children only if all but the last of them failed.
_REJECTED_SIBLINGS: Final = text(
    """
    SELECT count(*) FROM updates own
    JOIN updates u ON u.policy = own.policy AND u.parent_version = own.parent_version
    JOIN policies p ON p.update_id = u.id
    WHERE own.policy = :name AND own.version = :version AND p.version < own.version
        AND p.state = 'rejected'
    """
)


async def head_of(connection: AsyncConnection, name: str) -> PolicyVersion:
    """Return the version that a gated policy is trained on from.

    It is the newest that serves, or may still, and has no failed ancestor. If no trained one is
    left, it is version 0.
    """
    return version_of((await connection.execute(_HEAD, {"name": name})).one())


async def lock_descendants(
    connection: AsyncConnection, version: PolicyVersion, states: Sequence[PolicyState]
) -> list[PolicyVersion]:
    """Return the descendants of a version in these states, oldest first, locked."""
    values = {"name": version.name, "version": version.version, "states": list(states)}
    return [version_of(row) for row in await connection.execute(_DESCENDANTS_OF, values)]


async def failed_ancestor(
    connection: AsyncConnection, name: str, version: int
) -> PolicyVersion | None:
    """Return the oldest that failed of a version and its ancestors, or None if none did."""
    values = {"name": name, "version": version}
    row = (await connection.execute(_FAILED_ANCESTOR, values)).first()
    return None if row is None else version_of(row)


async def unloaded_ancestors(
    connection: AsyncConnection, name: str, version: int
) -> list[PolicyVersion]:
    """Return the ancestors of a version that no server has loaded yet, newest first.

    The chain ends at the first ancestor that was loaded.
    """
    rows = await connection.execute(_UNLOADED_ANCESTORS, {"name": name, "version": version})
    return [version_of(row) for row in rows]


async def updates_since_candidate(connection: AsyncConnection, name: str, version: int) -> int:
    """Return how many updates lie between a version and its newest ancestor that was loaded.

    Its own is among them.
    """
    values = {"name": name, "version": version}
    return int(await connection.scalar(_UPDATES_SINCE_LOADED, values) or 0)


async def rejected_siblings(connection: AsyncConnection, name: str, version: int) -> int:
    """Return how many older versions of the same parent were rejected."""
    values = {"name": name, "version": version}
    return int(await connection.scalar(_REJECTED_SIBLINGS, values) or 0)
