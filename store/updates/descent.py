"""Follow what was trained on from what, so that nothing of a version that failed ever serves."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.read.pages import version_of
from store.schema.trained import KL_TO_BASE, MOST_KL_TO_BASE
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
# A version and what it was trained on from, back to the first that a server has loaded: a candidate
# of several updates consists of these.
CHAIN: Final = """
    WITH RECURSIVE chain AS (
        SELECT version, parent_version FROM updates WHERE policy = :name AND version = :version
        UNION
        SELECT u.version, u.parent_version FROM chain
            JOIN policies p ON p.name = :name AND p.version = chain.parent_version
            JOIN updates u ON u.id = p.update_id
        WHERE p.state = 'written')
"""
_BEFORE: Final = text(
    f"""
    {CHAIN}
    SELECT p.*, (SELECT CAST(u.metrics ->> '{KL_TO_BASE}' AS float) FROM updates u
        WHERE u.id = p.update_id) AS {KL_TO_BASE}
    FROM policies p JOIN chain USING (version)
    WHERE p.name = :name AND p.version < :version ORDER BY p.version DESC
    """
)
# What else was trained on from the same version, and rejected. A version has several children only
# if all but the last of them failed.
_SIBLINGS: Final = text(
    """
    SELECT count(*) FROM updates own
    JOIN updates u ON u.policy = own.policy AND u.parent_version = own.parent_version
    JOIN policies p ON p.update_id = u.id
    WHERE own.policy = :name AND own.version = :version AND p.version < own.version
        AND p.state = 'rejected'
    """
)
# After so many rejections in a row the trainer holds and tries the servers, on an adapter that it
# made up (`trainer.updates.holding`): what fails after that is not the servers' fault.
SERVER_TRIED: Final = 2
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


async def reject_with_chain(
    connection: AsyncConnection,
    version: PolicyVersion,
    most_kl: float | None,
    *,
    reason: str,
    evidence: Mapping[str, Any] | None,
) -> None:
    """Reject a version for what was learned, and what else it consists of: the head goes back.

    With `most_kl`, the bound on the KL to the base model that it is above, those before it are
    rejected as far as the newest that is not above it, with which nothing is wrong. Without, it
    failed its probe, which a server may be to blame for: all are rejected once `SERVER_TRIED`
    others that were trained on from the same one had been rejected before.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await lock_policies(connection, [version.name])
    values = {"name": version.name, "version": version.version}
    before = [version_of(row) for row in (await connection.execute(_BEFORE, values)).all()]
    tried = await connection.scalar(_SIBLINGS, values)
    held = await lock_version(connection, version.name, version.version)
    await change_state(
        connection, held, "rejected", reason=reason, actor="trainer", evidence=evidence
    )
    if most_kl is None and tried < SERVER_TRIED:
        return
    for one in before:
        if most_kl is not None and (one.kl_to_base is None or one.kl_to_base <= most_kl):
            return
        why, figures = _as_well(one, version, most_kl)
        await change_state(
            connection, one, "rejected", reason=why, actor="trainer", evidence=figures
        )


def _as_well(
    one: PolicyVersion, last: PolicyVersion, most_kl: float | None
) -> tuple[str, Mapping[str, Any] | None]:
    """Return why what the rejected version `last` was made of is rejected, and the figures."""
    if most_kl is None:
        why = f"neither {last.served_name}, which was trained on from it, nor those tried before"
        return f"{why} are served as they were trained; it was never probed itself", None
    return (
        f"{last.served_name}, which was trained on from it, is too far from the base model, and its"
        f" own KL to the base model is {one.kl_to_base:.4g} nats a token: gate.most_kl_to_base is"
        f" {most_kl:g}",
        {KL_TO_BASE: one.kl_to_base, MOST_KL_TO_BASE: most_kl},
    )


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
