"""Change the states of policy versions: nothing else writes them.

`ALLOWED` is the table of transitions, and `change_state` the one statement that makes them: it adds
the event with the reason too, so that neither is there without the other
(docs/decisions/077-states-events-and-arms.md). Every other function moves traffic by several such
changes in the caller's transaction. It locks the policy first (`lock_policies`), so that of several
controllers, trainers and operators one moves traffic at a time.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, insert, null, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import NotGated, RolledBack, StateChanged, UnknownPolicy
from store.ids import new_id
from store.link.claimable import judged_by
from store.schema.tables import KL_TO_BASE, MOST_KL_TO_BASE, policies, policy_events
from store.tenants import DEFAULT
from store.version_queries import (
    failed_ancestor,
    lock_descendants,
    numbered_version,
    rejected_siblings,
    unloaded_ancestors,
    version_before,
)
from store.versions import (
    VERSION_COLUMNS,
    Actor,
    PolicyState,
    PolicyVersion,
    policy_name,
    version_of,
)

# The states that each state may become. A version begins `written`; the base model begins, and may
# end, `serving`.
ALLOWED: Final[Mapping[PolicyState, frozenset[PolicyState]]] = {
    "written": frozenset({"ready", "candidate", "rejected"}),
    "ready": frozenset({"serving", "retired", "rejected"}),
    "candidate": frozenset({"canary", "serving", "rejected"}),
    # It makes way for a newer version that an operator promoted: it keeps its episodes.
    "canary": frozenset({"serving", "published", "rolled_back"}),
    "serving": frozenset({"published", "rolled_back"}),
    # It lost the traffic, and stays loaded for the episodes that began with it.
    "published": frozenset({"serving", "rolled_back", "retired"}),
    "rolled_back": frozenset({"retired"}),
    # It is called back to serve again.
    "retired": frozenset({"published"}),
    "rejected": frozenset(),
}
# States of versions that never had traffic, and of those that have it only to be tried.
WITHOUT_TRAFFIC: Final[tuple[PolicyState, ...]] = ("written", "ready", "candidate")
_NOT_LIVE: Final[tuple[PolicyState, ...]] = (*WITHOUT_TRAFFIC, "canary")
# After so many rejections in a row the trainer holds and tries the servers, on an adapter that it
# made up (`trainer.updates.circuit_breaker`): what fails after that is not the servers' fault.
SERVER_TRIED: Final = 2
# The database ends a transaction that judges a policy and asks nothing for so long.
IDLE_S: Final = 120.0

# A canary that was rolled back keeps its share, by which it is known that it was one. An event has
# the clock's time, not the transaction's: whoever moves traffic has locked the policy by then, so
# that events are in the order of the moves.
_CHANGE: Final = text(
    """
    WITH changed AS (
        UPDATE policies SET state = :to, changed_at = now(),
            share = CASE WHEN :to = 'serving' AND version > 0 THEN NULL ELSE share END,
            rolled_back_at = CASE WHEN :to = 'rolled_back' THEN now() ELSE rolled_back_at END
        WHERE name = :name AND version = :version AND state = :from
        RETURNING name, version)
    INSERT INTO policy_events
        (id, name, version, from_state, to_state, reason, actor, evidence, at)
    SELECT CAST(:id AS uuid), name, version, :from, :to, :reason, :actor, CAST(:evidence AS jsonb),
        clock_timestamp()
    FROM changed RETURNING id
    """
)
_LOCK: Final = text(
    "SELECT name FROM policies WHERE version = 0 AND name = ANY(CAST(:names AS text[]))"
    " ORDER BY name FOR NO KEY UPDATE"
)
_END_IDLE: Final = text("SELECT set_config('idle_in_transaction_session_timeout', :idle, true)")
_HOLD: Final = text("SELECT pg_try_advisory_xact_lock(hashtext(:name))")
# Where the rewards never changed before, nothing said what they were made by.
_NOTE_REWARD: Final = text(
    """
    UPDATE policies SET gate = gate || jsonb_build_object('reward', CAST(:reward AS text))
    WHERE name = :name AND gate IS NOT NULL AND NOT gate ? 'reward'
    """
)
# By the clock, as whoever changes rewards has waited for all who store some.
_JUDGE_BY: Final = text(
    """
    UPDATE policies SET gate = gate || CAST(:units AS jsonb),
        changed_at = CASE WHEN state = 'canary' THEN clock_timestamp() ELSE changed_at END
    WHERE name = :name AND gate IS NOT NULL AND state IN ('ready', 'candidate', 'canary')
    RETURNING version, state
    """
)
# What had the traffic from one version on, and before another: by their numbers, which are given in
# the order in which versions are made.
_SERVED_SINCE: Final = text(
    f"""
    SELECT {VERSION_COLUMNS} FROM policies p
    WHERE name = :name AND version >= :first AND version < :version AND rolled_back_at IS NULL
        AND state IN ('published', 'retired')
        AND EXISTS (SELECT FROM policy_events v WHERE v.name = p.name AND v.version = p.version
            AND v.to_state = 'serving')
    ORDER BY version FOR NO KEY UPDATE
    """
)

# One change


async def change_state(
    connection: AsyncConnection,
    version: PolicyVersion,
    to: PolicyState,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Move a version from the state in which it was read to another, and record why.

    `evidence` is what the decision rested on; it is stored as JSON. A version that has the state
    already is not changed, and gets no event.

    Raises:
        StateChanged: the version has another state by now, or `ALLOWED` does not have the
            transition; nothing was written.
        RolledBack: the version was rolled back, so it cannot have that state any more.
    """
    if to == version.state:
        return
    if (version.ended or version.rolled_back) and to not in ("rolled_back", "retired"):
        why = "ended when the policy's line started again" if version.ended else "was rolled back"
        raise RolledBack(
            f"{version.name}@{version.version} {why}, so it cannot become {to!r}: nothing brings"
            " it back; import its adapter as a version of its own"
        )
    if to not in ALLOWED[version.state]:
        raise StateChanged(
            f"{version.name}@{version.version} is {version.state!r}, and cannot become {to!r}"
            f" ({reason}); it can become {', '.join(sorted(ALLOWED[version.state]))}"
        )
    changed = await connection.execute(
        _CHANGE,
        {
            "id": new_id(),
            "name": version.name,
            "version": version.version,
            "from": version.state,
            "to": to,
            "reason": reason,
            "actor": actor,
            "evidence": None if evidence is None else json.dumps(dict(evidence)),
        },
    )
    if changed.first() is None:
        raise StateChanged(
            f"{version.name}@{version.version} is not {version.state!r} any more, so it was not "
            f"made {to!r} ({reason}): read its state, and decide again"
        )


async def set_state(
    connection: AsyncConnection,
    name: str,
    version: int,
    state: PolicyState,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Move one version from its current state to `state`, as `change_state` does.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: `ALLOWED` does not have the transition.
        RolledBack: it was rolled back, so it cannot have that state any more.
    """
    current = await lock_version(connection, name, version)
    await change_state(connection, current, state, reason=reason, actor=actor, evidence=evidence)


async def add_event(
    connection: AsyncConnection,
    name: str,
    version: int,
    state: PolicyState,
    *,
    before: PolicyState | None = None,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Record why a version is in `state`: as its first state, or to stay in it (`before`)."""
    await connection.execute(
        insert(policy_events).values(
            id=new_id(),
            name=name,
            version=version,
            from_state=before,
            to_state=state,
            reason=reason,
            actor=actor,
            # None alone would be JSON's null.
            evidence=null() if evidence is None else dict(evidence),
        )
    )


async def lock_policies(connection: AsyncConnection, names: Sequence[str]) -> None:
    """Let nobody else move traffic between versions of these policies until the transaction ends.

    What is read afterwards is what there is then.
    """
    await connection.execute(_LOCK, {"names": sorted(names)})


async def lock_version(connection: AsyncConnection, name: str, version: int) -> PolicyVersion:
    """Return one version of policy `name`, whose state nobody else changes in the meantime.

    Raises:
        UnknownPolicy: there is no such version.
    """
    query = select(policies).where(policies.c.name == name, policies.c.version == version)
    row = (await connection.execute(query.with_for_update(key_share=True))).first()
    if row is None:
        raise UnknownPolicy(f"policy {name!r} has no version {version}")
    return version_of(row)


async def _in_state(
    connection: AsyncConnection, name: str, *states: PolicyState
) -> list[PolicyVersion]:
    """Return the versions of a policy in these states, oldest first."""
    query = select(policies).where(policies.c.name == name, policies.c.state.in_(states))
    rows = await connection.execute(query.order_by(policies.c.version))
    return [version_of(row) for row in rows]


# A version begins


async def ensure_base(
    connection: AsyncConnection, name: str, base: str | None = None, tenant: str = DEFAULT
) -> str:
    """Add the base model as version 0 of policy `name`, in state `serving`, unless it exists.

    `base` is the name that the base model is served under; None: the policy's. `tenant` is whose a
    policy is that begins now. Return the base that the policy began with.
    """
    began = await connection.scalar(
        postgresql.insert(policies)
        .values(name=name, version=0, state="serving", served_name=base or name, tenant=tenant)
        .on_conflict_do_nothing()
        .returning(policies.c.name)
    )
    if began is not None:
        why = "the policy began, with its base model"
        await add_event(connection, name, 0, "serving", reason=why, actor="trainer")
    served = select(policies.c.served_name).where(policies.c.name == name, policies.c.version == 0)
    return (await connection.execute(served)).scalar() or base or name


async def add_version(
    connection: AsyncConnection,
    name: str,
    version: int,
    adapter_path: str,
    update_id: UUID,
    *,
    imported_from: str | None = None,
) -> None:
    """Record a version whose adapter is complete on disk.

    `imported_from` is where the adapter came from, if no update trained it.
    """
    base = policies.alias("base")
    tenant = select(base.c.tenant).where(base.c.name == name, base.c.version == 0)
    await connection.execute(
        insert(policies).values(
            name=name,
            version=version,
            state="written",
            served_name=policy_name(name, version, name),
            tenant=func.coalesce(tenant.scalar_subquery(), DEFAULT),
            adapter_path=adapter_path,
            update_id=update_id,
        )
    )
    why = "its update is done" if imported_from is None else f"imported from {imported_from}"
    actor: Actor = "trainer" if imported_from is None else "import"
    await add_event(connection, name, version, "written", reason=why, actor=actor)


# It gets the traffic at once, or together with versions of other policies


async def promote(
    connection: AsyncConnection,
    name: str,
    version: int,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Give `version` the traffic; the version that had it becomes `published`.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: it is on no server, so it cannot serve.
        RolledBack: it was rolled back.
    """
    await lock_policies(connection, [name])
    new = await lock_version(connection, name, version)
    for serving in await _in_state(connection, name, "serving"):
        if serving.version != version:
            why = f"{name}@{version} took the traffic"
            await change_state(connection, serving, "published", reason=why, actor=actor)
    await change_state(connection, new, "serving", reason=reason, actor=actor, evidence=evidence)


async def make_ready(
    connection: AsyncConnection, name: str, version: int, *, reason: str, actor: Actor
) -> None:
    """Let `version`, which is loaded, wait to go live; one that waited before never will.

    Raises:
        UnknownPolicy: there is no such version.
    """
    new = await lock_version(connection, name, version)
    for ready in await _in_state(connection, name, "ready"):
        if ready.version != version:
            why = f"{name}@{version} is newer, and waits instead"
            await change_state(connection, ready, "retired", reason=why, actor=actor)
    await change_state(connection, new, "ready", reason=reason, actor=actor)


async def promote_together(
    connection: AsyncConnection, names: Sequence[str], wait_s: float
) -> list[PolicyVersion]:
    """Give the traffic to the versions of these policies that are ready, all at once, if it is due.

    It is if every policy has one, or if one of them has waited for `wait_s` seconds. Return the
    versions that were promoted. Several trainers may ask at the same time. Nothing is promoted of a
    policy that is frozen.
    """
    due, _ = await _due_together(connection, names, wait_s)
    if not due:
        return []
    # What waits for others must not keep these from coming: it locks nothing until it is due.
    await lock_policies(connection, names)
    ready, why = await _due_together(connection, names, wait_s, lock=True)
    for version in ready:
        await promote(connection, version.name, version.version, reason=why, actor="trainer")
    return ready


async def _due_together(
    connection: AsyncConnection, names: Sequence[str], wait_s: float, *, lock: bool = False
) -> tuple[list[PolicyVersion], str]:
    """Return the versions that are ready, if it is time to promote them, and why it is.

    With `lock` they stay ready until the transaction ends.
    """
    has_waited = text("changed_at < now() - make_interval(secs => :wait_s) AS has_waited")
    base = policies.alias("base")
    frozen = select(base.c.name).where(base.c.version == 0, base.c.frozen_at.is_not(None))
    query = (
        select(policies, has_waited.bindparams(wait_s=wait_s))
        .where(policies.c.name.in_(names), policies.c.state == "ready")
        .where(policies.c.name.not_in(frozen))
        .order_by(policies.c.name, policies.c.version)
    )
    ready = (await connection.execute(query.with_for_update() if lock else query)).all()
    if {row.name for row in ready} == set(names):
        return [version_of(row) for row in ready], "it is ready"
    if not any(row.has_waited for row in ready):
        return [], ""
    why = f"it has waited for {wait_s:g} s for others to go live with"
    return [version_of(row) for row in ready], why


# It is tried first


async def hold_gate(connection: AsyncConnection, name: str) -> bool:
    """Try to become the only one that judges a policy, until the transaction ends.

    Return False if another does already. Whoever is stopped or cut off while it holds the gate does
    not keep it: the database ends a transaction in which nothing is asked for `IDLE_S`.
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
) -> bool:
    """Let `version`, which is loaded, wait for its canary, to be judged by the rule `gate`.

    What was made before it and has no traffic yet never will have any: this one has learnt what
    that had. Return whether a candidate that waited makes way.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await lock_policies(connection, [name])
    makes_way = False
    for older in await _in_state(connection, name, "written", "candidate"):
        if older.version >= version:
            continue
        newer = f"{name}@{version} was made from more episodes, and waits instead"
        await change_state(connection, older, "rejected", reason=newer, actor="trainer")
        makes_way |= older.state == "candidate"
    new = await lock_version(connection, name, version)
    await _set(connection, name, version, gate=await judged_by(connection, name, gate))
    await change_state(connection, new, "candidate", reason=reason, actor="trainer")
    return makes_way


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
    await _set(connection, version.name, 0, share=base_share)
    await _set(connection, version.name, version.version, share=share)
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


async def end_base_share(connection: AsyncConnection, name: str) -> None:
    """Give the base model no new episodes any more: the policy has no gate."""
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version == 0, policies.c.share.is_not(None))
        .values(share=None)
    )


async def judge_anew(
    connection: AsyncConnection, name: str, before: str, units: Mapping[str, Any], *, actor: Actor
) -> None:
    """Let a policy's candidates be judged by other rewards; a trial that is under way begins anew.

    `before` is the digest of what rewards were made by until now, `units` what replaces parts of
    the candidates' rules. The serving version keeps its rule: it is not judged by rewards that it
    was not promoted for.
    """
    await connection.execute(_NOTE_REWARD, {"name": name, "reward": before})
    values = {"name": name, "units": json.dumps(dict(units))}
    for row in (await connection.execute(_JUDGE_BY, values)).all():
        if row.state == "canary":
            await add_event(
                connection,
                name,
                row.version,
                "canary",
                before="canary",
                reason="the reward is another sum: its trial begins anew, with what begins now",
                actor=actor,
            )


async def freeze(
    connection: AsyncConnection, name: str, *, frozen: bool, reason: str, actor: Actor
) -> None:
    """Let only operators move the policy's traffic from now on; or, if not `frozen`, all again.

    Raises:
        UnknownPolicy: there is no such policy.
    """
    base = await lock_version(connection, name, 0)
    await _set(connection, name, 0, frozen_at=text("now()") if frozen else None)
    described = f"{'frozen' if frozen else 'no longer frozen'}: {reason}"
    await add_event(
        connection, name, 0, base.state, before=base.state, reason=described, actor=actor
    )


async def _set(connection: AsyncConnection, name: str, version: int, **values: Any) -> None:
    """Set columns of a version that say how it is judged."""
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version == version)
        .values(**values)
    )


# It failed, and its descendants with it


async def reject(
    connection: AsyncConnection,
    version: PolicyVersion,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any],
) -> None:
    """Reject a candidate for its replay, and its descendants: the head goes back.

    `evidence` has the replay under that name, by which it is known for good that it failed.

    Raises:
        StateChanged: it has another state by now; nothing was written.
    """
    await lock_policies(connection, [version.name])
    await change_state(
        connection, version, "rejected", reason=reason, actor=actor, evidence=evidence
    )
    await _reject_descendants(connection, version, actor)


async def reject_with_chain(
    connection: AsyncConnection,
    version: PolicyVersion,
    most_kl: float | None,
    *,
    reason: str,
    evidence: Mapping[str, Any] | None,
) -> None:
    """Reject a version for what was learned, and the unloaded ancestors that learned it.

    With `most_kl`, the bound on the KL to the base model that it is above, its ancestors are
    rejected as far as the newest that is not above it. Without, it failed its probe, which a server
    may be to blame for: its ancestors are rejected once `SERVER_TRIED` siblings were rejected
    before.

    Raises:
        UnknownPolicy: there is no such version.
    """
    name, number = version.name, version.version
    await lock_policies(connection, [name])
    ancestors = await unloaded_ancestors(connection, name, number)
    siblings = await rejected_siblings(connection, name, number)
    await set_state(
        connection, name, number, "rejected", reason=reason, actor="trainer", evidence=evidence
    )
    if most_kl is None and siblings < SERVER_TRIED:
        return
    for ancestor in ancestors:
        if most_kl is None:
            why = (
                f"neither {version.served_name}, which was trained on from it, nor those tried"
                " before are served as they were trained; it was never probed itself"
            )
            figures = None
        elif ancestor.kl_to_base is None or ancestor.kl_to_base <= most_kl:
            return
        else:
            why = (
                f"{version.served_name}, which was trained on from it, is too far from the base"
                f" model, and its own KL to the base model is {ancestor.kl_to_base:.4g} nats a"
                f" token: gate.most_kl_to_base is {most_kl:g}"
            )
            figures = {KL_TO_BASE: ancestor.kl_to_base, MOST_KL_TO_BASE: most_kl}
        await change_state(
            connection, ancestor, "rejected", reason=why, actor="trainer", evidence=figures
        )


async def reject_orphan(connection: AsyncConnection, name: str, version: int) -> str | None:
    """Reject a version without traffic if it ended meanwhile, or one of its ancestors failed.

    Return why it was, or None. Until the transaction ends nothing of the policy fails.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await lock_policies(connection, [name])
    ancestor = await failed_ancestor(connection, name, version)
    if ancestor is None:
        return None
    why = _trained_on_from(ancestor)
    await set_state(connection, name, version, "rejected", reason=why, actor="trainer")
    return why


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
    it loaded. `to_base` is why it cannot be: then the base model serves. Its descendants that did
    not serve yet are rejected, a canary among them is rolled back. The episodes that it has keep
    it, and are not trained on.

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
    await _reject_descendants(connection, version, actor)
    if version.state == "canary":
        return None
    first = first or version
    await _roll_back_between(connection, first, version, actor)
    again = f"{version.name}@{version.version} was rolled back: {reason}"
    if to_base is not None:
        base = await numbered_version(connection, version.name, 0)
        assert base is not None
        before, again = base, f"{again}; {to_base}"
    else:
        before = await version_before(connection, first)
        if before.state == "retired":
            raise StateChanged(
                f"{before.name}@{before.version}, which served before, is retired, and so on no"
                " server: it cannot serve before it is loaded; decide again"
            )
    await promote(connection, before.name, before.version, reason=again, actor=actor)
    return before


async def _roll_back_between(
    connection: AsyncConnection, first: PolicyVersion, last: PolicyVersion, actor: Actor
) -> None:
    """Roll back every version that had the traffic from `first` until `last` got it.

    One that is retired by then is on no server, and stays so: it is only noted as rolled back.
    """
    values = {"name": last.name, "first": first.version, "version": last.version}
    why = (
        f"it served before {last.name}@{last.version}, which was rolled back with all since"
        f" {first.name}@{first.version}"
    )
    for row in (await connection.execute(_SERVED_SINCE, values)).all():
        version = version_of(row)
        if version.state == "retired":
            await _set(
                connection,
                version.name,
                version.version,
                rolled_back_at=text("now()"),
                changed_at=text("now()"),
            )
            await add_event(
                connection,
                version.name,
                version.version,
                "retired",
                before="retired",
                reason=why,
                actor=actor,
            )
        else:
            await change_state(connection, version, "rolled_back", reason=why, actor=actor)
        await _reject_descendants(connection, version, actor)


async def _reject_descendants(
    connection: AsyncConnection, version: PolicyVersion, actor: Actor
) -> None:
    """Reject the descendants of a version that never had traffic; roll a canary among them back."""
    why = _trained_on_from(version)
    for descendant in await lock_descendants(connection, version, _NOT_LIVE):
        to: PolicyState = "rejected" if descendant.state in WITHOUT_TRAFFIC else "rolled_back"
        await change_state(connection, descendant, to, reason=why, actor=actor)


def _trained_on_from(ancestor: PolicyVersion) -> str:
    if ancestor.ended:
        return f"{ancestor.name}@{ancestor.version} ended when the policy's line started again"
    failed = (
        "failed its replay" if ancestor.state in ("candidate", "rejected") else "was rolled back"
    )
    return f"it was trained on from {ancestor.name}@{ancestor.version}, which {failed}"
