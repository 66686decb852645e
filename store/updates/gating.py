"""Take a version through its gate: candidate, canary, serving; or rolled back, with what it made.

Every function here locks the policy first (`states.lock_policies`), so that of several stewards and
operators one moves traffic at a time; and each is one transaction of its caller's.
"""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import NotGated, StateChanged
from store.link.scores import judged_by
from store.read.pages import version_of
from store.schema.trained import CALLED_BACK, ONCE_SERVED, policies
from store.updates.descent import CHAIN, DESCENDANTS, reject_built_on
from store.updates.policies import numbered_version, promote
from store.updates.states import (
    add_event,
    change_state,
    lock_policies,
    lock_version,
    note_rolled_back,
)
from store.versions import Actor, PolicyVersion

# The one that had the traffic before it, as far as that can be loaded again; or the base model.
# That is told by times: an operator may have given it back to an older one in between. What served
# before events were kept has no time, nor has the base model's beginning: they are told by number.
# What was trained on from one that was rolled back may have what that was rolled back for.
_BEFORE: Final = text(
    f"""
    {DESCENDANTS.format(of="rolled_back_at IS NOT NULL")}
    SELECT version FROM policies
    WHERE name = :name AND version < :version AND version NOT IN (SELECT version FROM built)
        AND (version = 0 OR {ONCE_SERVED} OR state = 'retired' AND files_deleted_at IS NULL
            AND EXISTS (SELECT FROM policy_events v WHERE v.name = policies.name
                AND v.version = policies.version AND v.to_state = 'serving'))
    ORDER BY (
        SELECT max(v.at) FROM policy_events v
        WHERE v.name = policies.name AND v.version = policies.version AND v.to_state = 'serving'
            AND v.from_state IS NOT NULL AND v.at <= COALESCE((
                SELECT max(o.at) FROM policy_events o
                WHERE o.name = :name AND o.version = :version AND o.to_state = 'serving'),
                'infinity')
        ) DESC NULLS LAST, version DESC LIMIT 1
    """
)
# What had the traffic from one version on, and before another: by their numbers, which are given in
# the order in which versions are made.
_SERVED_SINCE: Final = text(
    """
    SELECT * FROM policies p
    WHERE name = :name AND version >= :first AND version < :version AND rolled_back_at IS NULL
        AND state IN ('published', 'retired')
        AND EXISTS (SELECT FROM policy_events v WHERE v.name = p.name AND v.version = p.version
            AND v.to_state = 'serving')
    ORDER BY version FOR NO KEY UPDATE
    """
)
_CALLED_BACK: Final = text(
    f"SELECT {CALLED_BACK} FROM policies p WHERE name = :name AND version = :version"
)
_SINCE: Final = text(f"{CHAIN} SELECT count(*) FROM chain")
# Whoever holds a gate, and is stopped or cut off, must not keep it from all others for hours.
IDLE_S: Final = 120.0
_END_IDLE: Final = text("SELECT set_config('idle_in_transaction_session_timeout', :idle, true)")
_HOLD: Final = text("SELECT pg_try_advisory_xact_lock(hashtext(:name))")


async def hold_gate(connection: AsyncConnection, name: str) -> bool:
    """Try to become the only one that judges a policy, until the transaction ends.

    Return False if another does already. The database ends a transaction in which nothing is asked
    for `IDLE_S`, with all that it holds.
    """
    await connection.execute(_END_IDLE, {"idle": f"{IDLE_S:g}s"})
    return bool(await connection.scalar(_HOLD, {"name": f"pawl-gate:{name}"}))


async def make_candidate(
    connection: AsyncConnection,
    name: str,
    version: int,
    gate: Mapping[str, Any],
    *,
    reason: str,
    actor: Actor = "trainer",
) -> bool:
    """Let `version`, which is loaded, wait for its canary, to be judged by the rule `gate`.

    What was made before it and has no traffic yet never will have any: this one has learnt what
    that had. Return whether a candidate that waited makes way.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await lock_policies(connection, [name])
    before = select(policies).where(
        policies.c.name == name,
        policies.c.version < version,
        policies.c.state.in_(("written", "candidate")),
    )
    waited = False
    for row in (await connection.execute(before.order_by(policies.c.version))).all():
        newer = f"{name}@{version} was made from more episodes, and waits instead"
        await change_state(connection, version_of(row), "rejected", reason=newer, actor=actor)
        waited |= row.state == "candidate"
    held = await lock_version(connection, name, version)
    await _set(connection, name, version, gate=await judged_by(connection, name, gate))
    await change_state(connection, held, "candidate", reason=reason, actor=actor)
    return waited


async def begin_canary(
    connection: AsyncConnection,
    version: PolicyVersion,
    share: float,
    base_share: float,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Give a candidate `share` of the new episodes, and the base model `base_share` for good.

    Both are fractions of all new episodes; `evidence` is what its replay came to, if it had one.

    Raises:
        StateChanged: it is no candidate any more.
    """
    await lock_policies(connection, [version.name])
    for number, part in ((0, base_share), (version.version, share)):
        await _set(connection, version.name, number, share=part)
    await change_state(connection, version, "canary", reason=reason, actor=actor, evidence=evidence)


async def watch(
    connection: AsyncConnection,
    name: str,
    version: int,
    gate: Mapping[str, Any],
    base_share: float,
) -> None:
    """Let `version`, which will serve untried, be watched by the rule `gate` while it does.

    The base model gets `base_share` of the new episodes for good, to compare with.
    """
    await lock_policies(connection, [name])
    await _set(connection, name, version, gate=await judged_by(connection, name, gate))
    await _set(connection, name, 0, share=base_share)


async def _set(connection: AsyncConnection, name: str, version: int, **values: Any) -> None:
    """Set what says how a version is judged."""
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version == version)
        .values(**values)
    )


async def reject(
    connection: AsyncConnection,
    version: PolicyVersion,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any],
) -> None:
    """Reject a candidate for its replay, and what was trained on from it: the head goes back.

    `evidence` has the replay under that name, by which it is known for good that it failed.

    Raises:
        StateChanged: it has another state by now; nothing was written.
    """
    await lock_policies(connection, [version.name])
    await change_state(
        connection, version, "rejected", reason=reason, actor=actor, evidence=evidence
    )
    await reject_built_on(connection, version, actor)


async def roll_back(
    connection: AsyncConnection,
    version: PolicyVersion,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
    to_base: str | None = None,
    first: PolicyVersion | None = None,
) -> PolicyVersion | None:
    """Take the new episodes from a canary, or from the version that serves.

    In the latter case the version before it serves again, which is returned; every server must have
    it loaded. `to_base` is why it cannot be: then the base model serves. What was trained on from
    it and did not serve yet is rejected, a canary rolled back. The episodes that it has keep it,
    and are not trained on.

    All of this holds for `first`, and what else had the traffic since that, as well, if it is
    given: what serves again is what had the traffic before that.

    Raises:
        StateChanged: it, or the version before it, has another state by now; nothing was written.
        NotGated: it is neither a canary nor the one that serves, or it is the base model.
    """
    if version.state not in ("canary", "serving") or not version.version:
        raise NotGated(
            f"{version.name}@{version.version} is {version.state!r}: only a trained version that "
            "serves, or is a canary, can be rolled back"
        )
    await lock_policies(connection, [version.name])
    await change_state(
        connection, version, "rolled_back", reason=reason, actor=actor, evidence=evidence
    )
    await reject_built_on(connection, version, actor)
    if version.state == "canary":
        return None
    first = first or version
    await _roll_back_between(connection, first, version, actor)
    before = await _instead(connection, first, to_base)
    again = f"{version.name}@{version.version} was rolled back: {reason}"
    if to_base is not None:
        again = f"{again}; {to_base}"
    await promote(connection, before.name, before.version, reason=again, actor=actor)
    return before


async def _roll_back_between(
    connection: AsyncConnection, first: PolicyVersion, last: PolicyVersion, actor: Actor
) -> None:
    """Roll back what had the traffic from one version on until another got it, with what it made.

    What is retired by then is on no server, and stays so.
    """
    values = {"name": last.name, "first": first.version, "version": last.version}
    why = f"it served before {last.name}@{last.version}, which was rolled back with all since"
    why = f"{why} {first.name}@{first.version}"
    for row in (await connection.execute(_SERVED_SINCE, values)).all():
        one = version_of(row)
        if one.state == "retired":
            await note_rolled_back(connection, one, reason=why, actor=actor)
        else:
            await change_state(connection, one, "rolled_back", reason=why, actor=actor)
        await reject_built_on(connection, one, actor)


async def version_before(connection: AsyncConnection, version: PolicyVersion) -> PolicyVersion:
    """Return what would serve if `version` lost the traffic: what had it before, or the base model.

    A `retired` one is on no server, and must be loaded before it can serve.
    """
    values = {"name": version.name, "version": version.version}
    number = (await connection.execute(_BEFORE, values)).scalar_one()
    return await _numbered(connection, version.name, number)


async def was_called_back(connection: AsyncConnection, version: PolicyVersion) -> bool:
    """Return whether a version is servable again to serve, and no server may have it loaded yet.

    It had been retired, and whoever called it back may have been killed since.
    """
    values = {"name": version.name, "version": version.version}
    return bool(await connection.scalar(_CALLED_BACK, values))


async def _instead(
    connection: AsyncConnection, version: PolicyVersion, to_base: str | None
) -> PolicyVersion:
    """Return what serves instead of a version."""
    if to_base is not None:
        return await _numbered(connection, version.name, 0)
    before = await version_before(connection, version)
    if before.state == "retired":
        raise StateChanged(
            f"{before.name}@{before.version}, which served before, is retired, and so on no server:"
            " it cannot serve before it is loaded; decide again"
        )
    return before


async def _numbered(connection: AsyncConnection, name: str, number: int) -> PolicyVersion:
    version = await numbered_version(connection, name, number)
    assert version is not None
    return version


async def end_base_share(connection: AsyncConnection, name: str) -> None:
    """Give the base model no new episodes any more: the policy has no gate."""
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version == 0, policies.c.share.is_not(None))
        .values(share=None)
    )


async def updates_since_candidate(connection: AsyncConnection, name: str, version: int) -> int:
    """Return how many updates lie between a version and the last that was loaded before it.

    Its own is among them.
    """
    return int(await connection.scalar(_SINCE, {"name": name, "version": version}) or 0)


async def freeze(
    connection: AsyncConnection, name: str, *, frozen: bool, reason: str, actor: Actor
) -> None:
    """Let only operators move the policy's traffic from now on; or, if not `frozen`, all again.

    Raises:
        UnknownPolicy: there is no such policy.
    """
    base = await lock_version(connection, name, 0)
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version == 0)
        .values(frozen_at=text("now()") if frozen else None)
    )
    described = f"{'frozen' if frozen else 'no longer frozen'}: {reason}"
    await add_event(
        connection, name, 0, base.state, before=base.state, reason=described, actor=actor
    )


async def is_frozen(connection: AsyncConnection, name: str) -> bool:
    """Return whether only operators move the policy's traffic."""
    query = select(policies.c.frozen_at).where(policies.c.name == name, policies.c.version == 0)
    return await connection.scalar(query) is not None
