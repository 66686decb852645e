"""Follow what was trained on from what, so that nothing of a version that failed ever serves."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.read.pages import version_of
from store.updates.states import change_state, lock_policies, lock_version
from store.versions import Actor, PolicyState, PolicyVersion

# All that was trained on from a version, whatever number of updates ago. An import has version 0 as
# its parent: nothing was trained.
DESCENDANTS: Final = """
    WITH RECURSIVE built AS (
        SELECT version FROM policies WHERE name = :name AND {of}
        UNION
        SELECT u.version FROM updates u JOIN built ON u.parent_version = built.version
        WHERE u.policy = :name AND u.version IS NOT NULL)
"""
# A version that failed: it was rolled back, or rejected by its replay. One that made way for a
# newer one did not fail.
_FAILED: Final = """
    (policies.rolled_back_at IS NOT NULL OR policies.state = 'rejected' AND EXISTS (
        SELECT FROM policy_events v WHERE v.name = policies.name AND v.version = policies.version
            AND v.to_state = 'rejected' AND jsonb_exists(v.evidence, 'replay')))
"""
_BUILT_ON: Final = text(
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
# What a version was trained from, as far back as it goes, if any of that failed.
_LOST: Final = text(
    f"""
    WITH RECURSIVE chain AS (
        SELECT parent_version AS version FROM updates WHERE policy = :name AND version = :version
        UNION
        SELECT u.parent_version FROM chain JOIN updates u
            ON u.policy = :name AND u.version = chain.version)
    SELECT policies.* FROM policies JOIN chain USING (version)
    WHERE policies.name = :name AND {_FAILED} ORDER BY version LIMIT 1
    """
)
# What never had traffic, and what has it only to be tried.
_WITHOUT_TRAFFIC: Final[tuple[PolicyState, ...]] = ("written", "ready", "candidate")
_NOT_LIVE: Final[tuple[PolicyState, ...]] = (*_WITHOUT_TRAFFIC, "canary")


async def reject_built_on(
    connection: AsyncConnection, version: PolicyVersion, actor: Actor
) -> None:
    """Reject what was trained on from a version and never had traffic; roll a canary back."""
    values = {"name": version.name, "version": version.version, "states": list(_NOT_LIVE)}
    why = _built_on(version)
    for row in (await connection.execute(_BUILT_ON, values)).all():
        built = version_of(row)
        to: PolicyState = "rejected" if built.state in _WITHOUT_TRAFFIC else "rolled_back"
        await change_state(connection, built, to, reason=why, actor=actor)


def _built_on(lost: PolicyVersion) -> str:
    """Return why what was trained on from a version that failed never serves."""
    failed = "failed its replay" if lost.state in ("candidate", "rejected") else "was rolled back"
    return f"it was trained on from {lost.name}@{lost.version}, which {failed}"


async def head_of(connection: AsyncConnection, name: str) -> PolicyVersion:
    """Return the version that a gated policy is trained on from.

    It is the newest that serves, or may still, and was not trained on from one that failed: that
    was rolled back, or rejected by its replay. If no trained one is left, it is version 0.
    """
    return version_of((await connection.execute(_HEAD, {"name": name})).one())


async def reject_orphan(connection: AsyncConnection, name: str, version: int) -> str | None:
    """Reject a version without traffic if what it was trained from failed meanwhile.

    Return why it was, or None. Until the transaction ends nothing of the policy fails.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await lock_policies(connection, [name])
    lost = (await connection.execute(_LOST, {"name": name, "version": version})).first()
    if lost is None:
        return None
    held = await lock_version(connection, name, version)
    why = _built_on(version_of(lost))
    await change_state(connection, held, "rejected", reason=why, actor="trainer")
    return why
