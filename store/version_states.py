"""Change the states of policy versions: nothing else writes them.

`ALLOWED` is the table of transitions. `change_state` makes one of them, and `roll_back` several in
one statement; both add the event with the reason in the same statement, so that neither is there
without the other. Every other function moves traffic by such changes in the caller's transaction.
It locks the policy first (`lock_policies`), so that of several controllers, trainers and operators
one moves traffic at a time (docs/decisions/077-states-events-and-arms.md).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, insert, null, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import NotGated, RolledBack, StateChanged, UnknownPolicy
from store.ids import new_id
from store.link.claimable import judged_by
from store.read.gates import is_proven
from store.schema.tables import BACK_TO, CONTROL, policies, policy_events
from store.tenants import DEFAULT
from store.version_queries import numbered_version, rollback_target
from store.versions import (
    Actor,
    PolicyState,
    PolicyVersion,
    policy_name,
    version_of,
)

# The states that each state may become. A version begins `written`; the base model begins, and may
# end, `serving`. What had no traffic yet is `rejected` if it fails, and `rolled_back` else.
ALLOWED: Final[Mapping[PolicyState, frozenset[PolicyState]]] = {
    "written": frozenset({"loaded", "retired", "rejected"}),
    # The servers have it, and it was probed.
    "loaded": frozenset({"canary", "serving", "retired", "rejected"}),
    "canary": frozenset({"serving", "retired", "rolled_back"}),
    "serving": frozenset({"retired", "rolled_back"}),
    # It lost the traffic, or never got it.
    "retired": frozenset({"serving", "rolled_back"}),
    "rejected": frozenset(),
    "rolled_back": frozenset(),
}
WITHOUT_TRAFFIC: Final[tuple[PolicyState, ...]] = ("written", "loaded")
# The database ends a transaction that judges a policy and asks nothing for so long.
IDLE_S: Final = 120.0
# The condition for a version that gets the traffic as soon as it is loaded.
AT_ONCE: Final = (
    "COALESCE(gate->>'mode', 'immediate') = 'immediate'"
    " AND NOT COALESCE(CAST(gate->>'approve' AS boolean), false)"
)

# The clock's time, not the transaction's: whoever moves traffic has locked the policy by then, so
# that events are in the order of the moves. What had no traffic has no episodes to be kept for: it
# is unloaded once it is retired.
_CHANGE: Final = text(
    """
    WITH changed AS (
        UPDATE policies SET state = :to, changed_at = clock_timestamp(),
            share = CAST(:share AS double precision),
            unloaded_at = CASE WHEN :to = 'retired' AND state IN ('written', 'loaded')
                THEN clock_timestamp() ELSE unloaded_at END
        WHERE name = :name AND version = :version AND state = :from
        RETURNING name, version, changed_at)
    INSERT INTO policy_events
        (id, name, version, from_state, to_state, reason, actor, evidence, at)
    SELECT CAST(:id AS uuid), name, version, :from, :to, :reason, :actor, CAST(:evidence AS jsonb),
        changed_at
    FROM changed RETURNING id
    """
)
# What falls: a version; if it serves, all that served since the control lost the traffic; and what
# was trained on from any of these. The control never falls, nor what was trained on from it alone:
# it did better than they did. Ids of events are made from the first, in the order of versions.
_ROLL_BACK: Final = text(
    f"""
    WITH RECURSIVE control AS (
        SELECT version, changed_at FROM policies WHERE name = :name AND {CONTROL}),
    falling AS (
        SELECT version, version AS root FROM policies p
        WHERE name = :name AND version > 0 AND version NOT IN (SELECT version FROM control)
            AND (version = :version OR CAST(:serves AS boolean) AND EXISTS (
                SELECT FROM policy_events v JOIN control c ON v.at >= c.changed_at
                WHERE v.name = p.name AND v.version = p.version AND v.to_state = 'serving'
                    AND v.from_state <> 'serving'))
        UNION
        SELECT u.version, falling.root
        FROM updates u JOIN falling ON u.parent_version = falling.version
        WHERE u.policy = :name AND u.version NOT IN (SELECT version FROM control)),
    before AS (
        SELECT p.version, p.state, root, row_number() OVER (ORDER BY p.version) AS place
        FROM policies p JOIN (
            SELECT DISTINCT ON (version) version, root FROM falling
            ORDER BY version, root = version DESC, root DESC) f
            USING (version)
        WHERE p.name = :name AND p.state NOT IN ('rejected', 'rolled_back')),
    changed AS (
        UPDATE policies p SET share = NULL, changed_at = clock_timestamp(),
            state = CASE WHEN before.state IN ('written', 'loaded')
                THEN 'rejected' ELSE 'rolled_back' END
        FROM before WHERE p.name = :name AND p.version = before.version
            AND p.state = before.state
        RETURNING p.version, before.state AS from_state, p.state AS to_state, root, place,
            p.changed_at)
    INSERT INTO policy_events
        (id, name, version, from_state, to_state, reason, actor, evidence, at)
    SELECT CAST(left(:id, 26) || lpad(to_hex(place), 6, '0') AS uuid), :name, version, from_state,
        to_state,
        CASE WHEN version = :version THEN :reason
            WHEN version = root THEN :served
            ELSE :descends || root || ', which was rolled back' END,
        :actor, CASE WHEN version = :version THEN CAST(:evidence AS jsonb) END, changed_at
    FROM changed
    """
)
_UNLOAD: Final = text(
    f"""
    UPDATE policies SET unloaded_at = clock_timestamp(), changed_at = clock_timestamp()
    WHERE name = :name AND version = ANY(CAST(:numbers AS integer[])) AND version > 0
        AND state IN ('retired', 'rolled_back') AND unloaded_at IS NULL AND share IS NULL
        AND version IS DISTINCT FROM {BACK_TO.format(name=":name")}
    RETURNING version, state
    """
)
_LOCK: Final = text(
    "SELECT name FROM policies WHERE version = 0 AND name = ANY(CAST(:names AS text[]))"
    " ORDER BY name FOR NO KEY UPDATE"
)
_END_IDLE: Final = text("SELECT set_config('idle_in_transaction_session_timeout', :idle, true)")
_HOLD: Final = text("SELECT pg_try_advisory_xact_lock(hashtext(:name))")
_CONTROL_SHARE: Final = text(
    "SELECT CAST(gate->>'control_share' AS double precision) FROM policies"
    " WHERE name = :name AND version = :version"
)
_CONTROL: Final = text(f"SELECT version FROM policies WHERE name = :name AND {CONTROL}")
# Where the rewards never changed before, nothing said what they were made by.
_NOTE_REWARD: Final = text(
    """
    UPDATE policies SET gate = gate || jsonb_build_object('reward', CAST(:reward AS text))
    WHERE name = :name AND gate IS NOT NULL AND NOT gate ? 'reward'
    """
)
# By the clock, as whoever changes rewards has waited for all who store some. What is compared
# begins anew: the trial with its canary, and the watch with the control.
_JUDGE_BY: Final = text(
    f"""
    UPDATE policies SET gate = gate || CAST(:units AS jsonb),
        changed_at = CASE WHEN state = 'canary' OR {CONTROL} THEN clock_timestamp()
            ELSE changed_at END
    WHERE name = :name AND (state IN ('loaded', 'canary', 'serving') OR {CONTROL})
    RETURNING version, state
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
    share: float | None = None,
) -> None:
    """Move a version from the state in which it was read to another, and record why.

    `evidence` is what the decision rested on; it is stored as JSON. `share` is the share of new
    episodes that it has in its new state, if it is an arm of its own. A version that has the state
    already is not changed, and gets no event.

    Raises:
        StateChanged: the version has another state by now, or `ALLOWED` does not have the
            transition; nothing was written.
        RolledBack: the version was rolled back, so it cannot have that state any more.
    """
    if to == version.state:
        return
    rolled_back = version.state == "rolled_back"
    if rolled_back or (version.ended and to not in ("rolled_back", "retired")):
        why = "was rolled back" if rolled_back else "ended when the policy's line started again"
        raise RolledBack(
            f"{version.name}@{version.version} {why}, so it cannot become {to!r}: nothing brings"
            " it back; import its adapter as a version of its own"
        )
    if to not in ALLOWED[version.state]:
        raise StateChanged(
            f"{version.name}@{version.version} is {version.state!r}, and cannot become {to!r}"
            f" ({reason}); it can become {', '.join(sorted(ALLOWED[version.state])) or 'nothing'}"
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
            "share": share,
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


# It waits, gets the traffic, and loses it to a newer one


async def make_loaded(
    connection: AsyncConnection,
    name: str,
    version: int,
    rule: Mapping[str, Any],
    *,
    reason: str,
    actor: Actor,
) -> None:
    """Let `version`, which every server has, wait for traffic, to be judged by the rule `rule`.

    What was made before it and waits yet never will have any: this one has learnt what that had.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: it is not `written` any more: what it was trained from was rolled back.
    """
    await lock_policies(connection, [name])
    new = await lock_version(connection, name, version)
    for older in await _in_state(connection, name, *WITHOUT_TRAFFIC):
        if older.version < version:
            why = f"{name}@{version} is newer, and waits instead"
            await change_state(connection, older, "retired", reason=why, actor=actor)
    await _set(connection, name, version, gate=await judged_by(connection, name, rule))
    await change_state(connection, new, "loaded", reason=reason, actor=actor)


async def begin_canary(
    connection: AsyncConnection,
    version: PolicyVersion,
    share: float,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Give a loaded version `share` of the new episodes, a fraction of all.

    Raises:
        StateChanged: it is not loaded any more.
    """
    await lock_policies(connection, [version.name])
    await change_state(
        connection,
        version,
        "canary",
        reason=reason,
        actor=actor,
        evidence=evidence,
        share=share,
    )


async def promote(
    connection: AsyncConnection,
    name: str,
    version: int,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
    control_share: float | None = None,
) -> None:
    """Give `version` the traffic; the version that had it is retired, and kept for its episodes.

    The last version with proof stays as the control, on `control_share` of the new episodes (None:
    what the rule of `version` says): that is what had the traffic if it is the base model, was
    promoted for being better, or there is no control yet.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: it is on no server, so it cannot serve.
        RolledBack: it was rolled back.
    """
    await lock_policies(connection, [name])
    new = await lock_version(connection, name, version)
    if new.state == "serving":
        return
    if new.unloaded and new.state == "retired":
        raise StateChanged(
            f"{new.served_name} is unloaded, so it cannot serve: recall it first, and promote it"
            " once the servers have it"
        )
    control = await connection.scalar(_CONTROL, {"name": name})
    values = {"name": name, "version": version}
    share = control_share or await connection.scalar(_CONTROL_SHARE, values) or None
    if control == version:
        share = None
    serving = next(iter(await _in_state(connection, name, "serving")), None)
    is_next = serving is not None and (
        control is None
        or serving.version == 0
        or await is_proven(connection, name, serving.version)
    )
    if control is not None:
        await _set(connection, name, control, share=None if is_next else share)
    if serving is not None:
        await change_state(
            connection,
            serving,
            "retired",
            reason=f"{new.served_name} took the traffic",
            actor=actor,
            share=share if is_next else None,
        )
    await change_state(connection, new, "serving", reason=reason, actor=actor, evidence=evidence)


async def set_control_share(connection: AsyncConnection, name: str, share: float) -> None:
    """Give the policy's control, if it has one, this share of the new episodes; 0: it ends."""
    control = await connection.scalar(_CONTROL, {"name": name})
    if control is not None:
        await _set(connection, name, control, share=share or None)


async def promote_together(
    connection: AsyncConnection, names: Sequence[str], wait_s: float
) -> list[PolicyVersion]:
    """Give the traffic to these policies' loaded versions, all at once, if it is due.

    It is if every policy has one, or if one of them has waited for `wait_s` seconds. Return the
    versions that were promoted. Several trainers may ask at the same time. Nothing is promoted of a
    policy that is frozen, or whose version waits to be judged or approved.
    """
    due, _ = await _due_together(connection, names, wait_s)
    if not due:
        return []
    # What waits for others must not keep these from coming: it locks nothing until it is due.
    await lock_policies(connection, names)
    loaded, why = await _due_together(connection, names, wait_s, lock=True)
    for version in loaded:
        await promote(connection, version.name, version.version, reason=why, actor="trainer")
    return loaded


async def _due_together(
    connection: AsyncConnection, names: Sequence[str], wait_s: float, *, lock: bool = False
) -> tuple[list[PolicyVersion], str]:
    """Return the versions that are loaded, if it is time to promote them, and why it is.

    With `lock` they stay so until the transaction ends.
    """
    has_waited = text("changed_at < now() - make_interval(secs => :wait_s) AS has_waited")
    base = policies.alias("base")
    frozen = select(base.c.name).where(base.c.version == 0, base.c.frozen_at.is_not(None))
    query = (
        select(policies, has_waited.bindparams(wait_s=wait_s))
        .where(policies.c.name.in_(names), policies.c.state == "loaded")
        .where(policies.c.name.not_in(frozen), text(AT_ONCE))
        .order_by(policies.c.name, policies.c.version)
    )
    loaded = (await connection.execute(query.with_for_update() if lock else query)).all()
    if {row.name for row in loaded} == set(names):
        return [version_of(row) for row in loaded], "it is loaded"
    if not any(row.has_waited for row in loaded):
        return [], ""
    why = f"it has waited for {wait_s:g} s for others to go live with"
    return [version_of(row) for row in loaded], why


# It is judged


async def hold_gate(connection: AsyncConnection, name: str) -> bool:
    """Try to become the only one that judges a policy, until the transaction ends.

    Return False if another does already. Whoever is stopped or cut off while it holds the gate does
    not keep it: the database ends a transaction in which nothing is asked for `IDLE_S`.
    """
    await connection.execute(_END_IDLE, {"idle": f"{IDLE_S:g}s"})
    return bool(await connection.scalar(_HOLD, {"name": f"pawl-gate:{name}"}))


async def judge_anew(
    connection: AsyncConnection, name: str, before: str, units: Mapping[str, Any], *, actor: Actor
) -> None:
    """Let versions be judged by other rewards; what is compared now is compared anew.

    `before` is the digest of what rewards were made by until now, `units` what replaces parts of
    the rules.
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


# It is taken from the servers, or from the traffic


async def mark_unloaded(
    connection: AsyncConnection, name: str, numbers: Collection[int], reason: str, actor: Actor
) -> set[int]:
    """Let no server keep these versions for their episodes; return those that this is true of now.

    The control is left, and what a roll-back would give the traffic to, and what is not retired or
    rolled back by now.
    """
    await lock_policies(connection, [name])
    rows = (await connection.execute(_UNLOAD, {"name": name, "numbers": list(numbers)})).all()
    for row in rows:
        await add_event(
            connection, name, row.version, row.state, before=row.state, reason=reason, actor=actor
        )
    return {row.version for row in rows}


async def recall(
    connection: AsyncConnection, name: str, version: int, *, reason: str, actor: Actor
) -> None:
    """Let the servers load a retired version again, so that it can be promoted.

    One that is loaded already stays so.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: it is not retired, or its files were deleted.
        RolledBack: it was rolled back, or ended.
    """
    await lock_policies(connection, [name])
    retired = await lock_version(connection, name, version)
    if retired.state == "rolled_back" or retired.ended:
        raise RolledBack(f"{retired.served_name} was rolled back, or ended: it never serves again")
    if retired.state != "retired" or retired.files_deleted:
        why = "its files were deleted" if retired.files_deleted else f"it is {retired.state!r}"
        raise StateChanged(f"{retired.served_name} cannot be loaded again: {why}")
    if retired.unloaded:
        now = func.clock_timestamp()
        await _set(connection, name, version, unloaded_at=None, changed_at=now)
        await add_event(
            connection, name, version, "retired", before="retired", reason=reason, actor=actor
        )


async def roll_back(
    connection: AsyncConnection,
    version: PolicyVersion,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> PolicyVersion | None:
    """Take the new episodes from a canary, or from the version that serves; or reject a loaded one.

    With what serves, all that served since the control falls, and the control serves again; without
    a control what served before it, or the base model. That is returned, and every server has it.
    What was trained on from any of these falls too: it is rejected if it had no traffic yet.
    Episodes that have such a version keep it, and are not trained on.

    Raises:
        StateChanged: it has another state by now; nothing was written.
        NotGated: it is not loaded, a canary or the one that serves, or it is the base model.
    """
    name, number = version.name, version.version
    if version.state not in ("loaded", "canary", "serving") or not number:
        raise NotGated(
            f"{name}@{number} is {version.state!r}: only a trained version that serves, is a"
            " canary, or waits for its evaluation, can be rolled back"
        )
    await lock_policies(connection, [name])
    now = await lock_version(connection, name, number)
    if now.state != version.state:
        raise StateChanged(
            f"{name}@{number} is {now.state!r} by now, and not {version.state!r}, so it was not"
            f" rolled back ({reason}): decide again"
        )
    values = {
        "id": new_id().hex,
        "name": name,
        "version": number,
        "serves": version.state == "serving",
        "reason": reason,
        "served": f"it served since the control did, as {name}@{number}, which was rolled back",
        "descends": f"it was trained on from {name}@",
        "actor": actor,
        "evidence": None if evidence is None else json.dumps(dict(evidence)),
    }
    await connection.execute(_ROLL_BACK, values)
    if version.state != "serving":
        return None
    serves = await rollback_target(connection, name)
    again = f"{name}@{number} was rolled back: {reason}"
    await promote(connection, name, serves.version, reason=again, actor=actor)
    return await numbered_version(connection, name, serves.version)
