"""Change the states of policy versions; no other module does.

`change_state` makes one of the `ALLOWED_TRANSITIONS`, and `roll_back` several in one statement;
both add the events in the same statement, so that every change has its reason
(docs/decisions/077-states-events-and-arms.md). The other functions use these two to move traffic in
the caller's transaction. They lock the policy first (`lock_policies`), so that only one controller,
trainer or operator moves traffic at a time.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict, Unpack
from uuid import UUID

from sqlalchemy import func, insert, null, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import RolledBack, StateChanged, UnknownPolicy, WrongVersionState
from store.ids import new_id
from store.schema.tables import CONTROL, LIVE, PROMOTED_WHEN_LOADED, ROLLBACK_TARGET, policies
from store.tenants import DEFAULT
from store.version_queries import numbered_version, rollback_target, versions_in_states, why_held
from store.versions import (
    VERSION_COLUMNS,
    Actor,
    PolicyState,
    PolicyVersion,
    policy_name,
    version_of,
)

# The states that each state may become. A version begins `written`; the base model begins, and may
# end, `serving`. A version that fails is `rejected` if it had no traffic yet, else `rolled_back`.
ALLOWED_TRANSITIONS: Final[Mapping[PolicyState, frozenset[PolicyState]]] = {
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
STATES_WITHOUT_TRAFFIC: Final[tuple[PolicyState, ...]] = ("written", "loaded")

_INSERT_EVENT: Final = """INSERT INTO policy_events
        (id, name, version, from_state, to_state, reason, actor, evidence, at)"""
# `clock_timestamp()`, as the policy is locked: events are in the order of the moves. A version that
# had no traffic has no episodes to be kept for, so it is unloaded once it is retired.
_CHANGE: Final = text(
    f"""
    WITH changed AS (
        UPDATE policies SET state = :to, changed_at = clock_timestamp(),
            share = CAST(:share AS double precision),
            frozen_at = CASE WHEN version = 0 THEN frozen_at END,
            awaits_approval_at = NULL,
            unloaded_at = CASE WHEN :to = 'retired' AND state IN ('written', 'loaded')
                THEN clock_timestamp() ELSE unloaded_at END
        WHERE name = :name AND version = :version AND state = :from
        RETURNING name, version, changed_at)
    {_INSERT_EVENT}
    SELECT CAST(:id AS uuid), name, version, :from, :to, :reason, :actor, CAST(:evidence AS jsonb),
        changed_at
    FROM changed RETURNING id
    """
)
_ADD_EVENT: Final = text(
    f"""
    {_INSERT_EVENT}
    VALUES (CAST(:id AS uuid), :name, :version, :from, :to, :reason, :actor,
        CAST(:evidence AS jsonb), clock_timestamp())
    """
)
# This rolls back the version; if it serves, all versions that served since the control did; and all
# descendants of these. The control is not rolled back, nor are versions that descend from it alone:
# it did better than the others. Ids of events are made from one id, in the order of versions.
_ROLL_BACK: Final = text(
    f"""
    WITH RECURSIVE control AS (
        SELECT version, (SELECT max(at) FROM policy_events v
            WHERE v.name = p.name AND v.version = p.version AND v.to_state = 'serving'
                AND v.from_state IS DISTINCT FROM 'serving') AS served_at
        FROM policies p WHERE name = :name AND {CONTROL}),
    falling AS (
        SELECT version, version AS root FROM policies p
        WHERE name = :name AND version > 0 AND version NOT IN (SELECT version FROM control)
            AND (version = :version OR CAST(:serves AS boolean) AND EXISTS (
                SELECT FROM policy_events v JOIN control ON v.at > control.served_at
                WHERE v.name = p.name AND v.version = p.version AND v.to_state = 'serving'
                    AND v.from_state <> 'serving'))
        UNION
        SELECT u.version, falling.root
        FROM updates u JOIN falling ON u.parent_version = falling.version
        WHERE u.policy = :name AND u.version NOT IN (SELECT version FROM control)),
    before AS (
        SELECT DISTINCT ON (version) version, root, state
        FROM falling JOIN policies p USING (version)
        WHERE p.name = :name AND p.state NOT IN ('rejected', 'rolled_back')
        ORDER BY version, root = version DESC, root DESC),
    changed AS (
        UPDATE policies p SET share = NULL, awaits_approval_at = NULL,
            changed_at = CASE WHEN p.unloaded_at IS NULL THEN clock_timestamp()
                ELSE p.changed_at END,
            state = CASE WHEN before.state IN ('written', 'loaded')
                THEN 'rejected' ELSE 'rolled_back' END
        FROM before
        WHERE p.name = :name AND p.version = before.version AND p.state = before.state
        RETURNING p.version, before.state AS was, p.state, root)
    {_INSERT_EVENT}
    SELECT CAST(left(:id, 26) || lpad(to_hex(version), 6, '0') AS uuid), :name, version, was, state,
        CASE WHEN version = :version THEN :reason
            WHEN version = root THEN :served ELSE :descends || root || ', which failed' END,
        :actor, CASE WHEN version = :version THEN CAST(:evidence AS jsonb) END, clock_timestamp()
    FROM changed
    """
)
_UNLOAD: Final = text(
    f"""
    UPDATE policies
    SET unloaded_at = clock_timestamp(), changed_at = clock_timestamp(), share = NULL
    WHERE name = :name AND version = ANY(CAST(:numbers AS integer[])) AND version > 0
        AND state IN ('retired', 'rolled_back') AND unloaded_at IS NULL
        AND (:is_lost OR share IS NULL
            AND version IS DISTINCT FROM {ROLLBACK_TARGET.format(name=":name")})
    RETURNING version, state
    """
)
# The database ends a transaction that has locked a policy and is idle for this long: its process
# may have been stopped, or its machine cut off.
IDLE_TRANSACTION_S: Final = 120.0
_LOCK: Final = text(
    "SELECT name FROM policies, set_config('idle_in_transaction_session_timeout', :idle, true)"
    " WHERE version = 0 AND name = ANY(CAST(:names AS text[]))"
    " ORDER BY name FOR NO KEY UPDATE OF policies"
)
_CONTROL: Final = text(
    f"""
    SELECT (SELECT version FROM policies WHERE name = :name AND {CONTROL}) AS version,
        (SELECT share FROM policies WHERE name = :name AND {CONTROL}) AS now,
        CAST(gate->>'control_share' AS double precision) AS share,
        gate->>'mode' <> 'immediate' AS was_tried
    FROM policies WHERE name = :name AND version = :version
    """
)
_END_HOLD: Final = text(
    """
    UPDATE policies SET frozen_at = NULL
    WHERE name = :name AND version > 0 AND frozen_at IS NOT NULL RETURNING version, state
    """
)
_RESTART_WATCH: Final = text(
    f"""
    UPDATE policies c SET changed_at = clock_timestamp(),
        share = NULLIF(CAST(s.gate->>'control_share' AS double precision), 0)
    FROM policies s
    WHERE s.name = :name AND s.state = 'serving' AND c.name = :name AND c.state = 'retired'
        AND c.version = COALESCE({ROLLBACK_TARGET.format(name=":name")}, 0)
    """
)
_TO_PROMOTE_TOGETHER: Final = text(
    f"""
    SELECT {VERSION_COLUMNS}, CAST(gate->>'wait_for_others_s' AS double precision) AS wait_s,
        changed_at < now() - make_interval(secs =>
            COALESCE(CAST(gate->>'wait_for_others_s' AS double precision), 0)) AS has_waited
    FROM policies p
    WHERE name = ANY(CAST(:names AS text[])) AND state = 'loaded' AND {PROMOTED_WHEN_LOADED}
        AND NOT EXISTS (SELECT FROM policies b
            WHERE b.name = p.name AND b.version = 0 AND b.frozen_at IS NOT NULL)
    ORDER BY name, version
    """
)
_DECIDED_ABOUT: Final = text(
    "SELECT min(version) FROM policies WHERE name = :name AND state = 'loaded'"
    " AND (gate->>'mode' = 'evaluated'"
    " OR gate->>'mode' = 'immediate' AND gate->>'approve' = 'true')"
)
_RENEW_RULES: Final = text(
    f"""
    UPDATE policies SET gate = CASE WHEN state = 'written' THEN r.rule
        ELSE COALESCE(gate, '{{}}') || jsonb_build_object('publish_with', r.rule->'publish_with',
            'wait_for_others_s', r.rule->'wait_for_others_s') END
    FROM (SELECT CAST(:rule AS jsonb) AS rule) r
    WHERE name = :name AND {LIVE} AND state IN ('written', 'loaded')
    """
)
# `clock_timestamp()`, as the change of rewards has waited for all transactions that store some.
_JUDGE_BY: Final = text(
    f"""
    UPDATE policies SET gate = gate || CAST(:units AS jsonb),
        changed_at = CASE WHEN state IN ('canary', 'retired') THEN clock_timestamp()
            ELSE changed_at END
    WHERE name = :name AND (state IN ('written', 'loaded', 'canary', 'serving') OR {CONTROL})
    RETURNING version, state
    """
)


class Why(TypedDict):
    """Why a version changes: the reason in words, the actor who decided, and the evidence."""

    reason: str
    actor: Actor
    evidence: NotRequired[Mapping[str, Any] | None]


# One change


async def change_state(
    connection: AsyncConnection,
    version: PolicyVersion,
    to: PolicyState,
    *,
    share: float | None = None,
    **why: Unpack[Why],
) -> None:
    """Move a version from the state in which it was read to another, and record why.

    `share` is its share of new episodes as a canary or the control. A version that has the state
    already is not changed, and gets no event.

    Raises:
        StateChanged: the version has another state by now, the transition is not one of
            `ALLOWED_TRANSITIONS`, or an unloaded version was to serve; nothing was written.
        RolledBack: the version was rolled back, or ended, so it cannot have that state any more.
    """
    if to == version.state:
        return
    _check_allowed(version, to, why["reason"])
    of_version = {"name": version.name, "version": version.version, "from": version.state}
    values = {**of_version, "to": to, "share": share, **_event_values(why)}
    if (await connection.execute(_CHANGE, values)).first() is None:
        raise StateChanged(
            f"{version.name}@{version.version} is not {version.state!r} any more, so it was not "
            f"made {to!r} ({why['reason']}): read its state, and decide again"
        )


def _check_allowed(version: PolicyVersion, to: PolicyState, reason: str) -> None:
    if version.state == "rolled_back" or (version.ended and to == "serving"):
        raise RolledBack(
            f"{version.name}@{version.version} was rolled back, or ended when the policy's line"
            f" started again, so it cannot become {to!r}: this is final; import its adapter as a"
            " new version"
        )
    if to not in ALLOWED_TRANSITIONS[version.state]:
        may_become = ", ".join(sorted(ALLOWED_TRANSITIONS[version.state])) or "nothing"
        raise StateChanged(
            f"{version.name}@{version.version} is {version.state!r}, and cannot become {to!r}"
            f" ({reason}); it can become {may_become}"
        )
    if version.unloaded and to == "serving":
        raise StateChanged(
            f"{version.served_name} is unloaded, so it cannot serve: recall it first, and promote"
            " it once the servers have it"
        )


async def set_state(
    connection: AsyncConnection, name: str, version: int, state: PolicyState, **why: Unpack[Why]
) -> None:
    """Move one version from its current state to `state`, as `change_state` does.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged, RolledBack: as in `change_state`.
    """
    current = await lock_version(connection, name, version)
    await change_state(connection, current, state, **why)


async def add_event(
    connection: AsyncConnection,
    name: str,
    version: int,
    state: PolicyState,
    *,
    is_first: bool = False,
    **why: Unpack[Why],
) -> None:
    """Record an event without a change of state: why a version stays in `state`.

    With `is_first`, the event records a new version and its first state. `change_state` itself
    records the changes that it makes.
    """
    before = None if is_first else state
    values = {"name": name, "version": version, "from": before, "to": state}
    await connection.execute(_ADD_EVENT, values | _event_values(why))


def _event_values(why: Why) -> dict[str, Any]:
    evidence = why.get("evidence")
    as_json = None if evidence is None else json.dumps(dict(evidence))
    return {"id": new_id().hex, "evidence": as_json, "reason": why["reason"], "actor": why["actor"]}


async def lock_policies(connection: AsyncConnection, names: Sequence[str]) -> None:
    """Keep others from moving the traffic of these policies until the transaction ends.

    Reads after this see all earlier moves.
    """
    await connection.execute(_LOCK, {"names": sorted(names), "idle": f"{IDLE_TRANSACTION_S:g}s"})


async def lock_version(connection: AsyncConnection, name: str, version: int) -> PolicyVersion:
    """Lock and return one version of policy `name`.

    Raises:
        UnknownPolicy: there is no such version.
    """
    query = select(policies).where(policies.c.name == name, policies.c.version == version)
    row = (await connection.execute(query.with_for_update(key_share=True))).first()
    if row is None:
        raise UnknownPolicy(f"policy {name!r} has no version {version}")
    return version_of(row)


async def _set_columns(connection: AsyncConnection, name: str, version: int, **values: Any) -> None:
    """Set columns of a version's row other than `state`."""
    of_version = (policies.c.name == name, policies.c.version == version)
    await connection.execute(update(policies).where(*of_version).values(**values))


# A version begins


async def ensure_base(
    connection: AsyncConnection, name: str, base: str | None = None, tenant: str = DEFAULT
) -> str:
    """Add the base model as version 0 of policy `name`, in state `serving`, unless it exists.

    `base` is the name that the base model is served under; None: the policy's name. `tenant` is the
    tenant of a new policy. Return the name of the base model that the policy began with.
    """
    began = await connection.scalar(
        postgresql.insert(policies)
        .values(name=name, version=0, state="serving", served_name=base or name, tenant=tenant)
        .on_conflict_do_nothing()
        .returning(policies.c.name)
    )
    if began is not None:
        why = "the policy began, with its base model"
        await add_event(connection, name, 0, "serving", is_first=True, reason=why, actor="trainer")
    served = select(policies.c.served_name).where(policies.c.name == name, policies.c.version == 0)
    return (await connection.execute(served)).scalar() or base or name


async def add_version(
    connection: AsyncConnection,
    name: str,
    version: int,
    adapter_path: str,
    update_id: UUID,
    *,
    rule: Mapping[str, Any] | None = None,
    imported_from: str | None = None,
) -> None:
    """Record a new version, in state `written`, whose adapter is complete on disk.

    The controller publishes and judges it by `rule`: its recipe's `[publish]` and what that needs
    (`Recipe.judged_by`), and `publish_with`, the policies that go live with it. None: the defaults.
    `imported_from` is the origin of an imported adapter, which no update trained; else None.
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
            gate=null() if rule is None else dict(rule),
        )
    )
    why = "its update is done" if imported_from is None else f"imported from {imported_from}"
    actor: Actor = "trainer" if imported_from is None else "import"
    await add_event(connection, name, version, "written", is_first=True, reason=why, actor=actor)


# Loading, trial and promotion


async def make_loaded(
    connection: AsyncConnection,
    name: str,
    version: int,
    **why: Unpack[Why],
) -> None:
    """Move `version`, which every server that answers has, to state `loaded`.

    Older versions that still wait for traffic are retired, as this version descends from them. But
    the oldest stays if it is to be evaluated or approved: otherwise no such decision would ever be
    made while new versions come quickly.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: it is not `written` any more: a version that it descends from was rolled back.
    """
    await lock_policies(connection, [name])
    new = await lock_version(connection, name, version)
    decided_about = await connection.scalar(_DECIDED_ABOUT, {"name": name})
    for older in await versions_in_states(connection, name, *STATES_WITHOUT_TRAFFIC):
        if older.version < version and older.version != decided_about:
            newer = f"{name}@{version} is newer, and waits instead"
            await change_state(connection, older, "retired", reason=newer, actor=why["actor"])
    await change_state(connection, new, "loaded", **why)


async def begin_canary(
    connection: AsyncConnection, version: PolicyVersion, share: float, **why: Unpack[Why]
) -> None:
    """Give a loaded version `share` of the new episodes, a fraction of all.

    Raises:
        StateChanged: it is not loaded any more.
    """
    await lock_policies(connection, [version.name])
    await change_state(connection, version, "canary", share=share, **why)


async def promote(
    connection: AsyncConnection,
    name: str,
    version: int,
    *,
    control_share: float | None = None,
    **why: Unpack[Why],
) -> None:
    """Give `version` the traffic; the version that had it is retired, and kept for its episodes.

    The control stays, with `control_share` of the new episodes (None: what the rule of `version`
    says; 0: there is no control). The version that had the traffic becomes the control if there is
    none yet, or if the controller tried `version` against it. If the controller promotes an untried
    version while training is held, its update began before the hold: training stays held, and the
    control keeps its share.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: its state does not allow it to serve, or it is unloaded.
        RolledBack: it was rolled back, or ended.
    """
    await lock_policies(connection, [name])
    new = await lock_version(connection, name, version)
    if new.state == "serving":
        return
    # Checked first, so that nothing was written if the version cannot serve.
    _check_allowed(new, "serving", why["reason"])
    control = (await connection.execute(_CONTROL, {"name": name, "version": version})).one()
    share = (control.share if control_share is None else control_share) or None
    was_tried = control.was_tried and why["actor"] == "controller"
    is_new = new.state == "loaded" and why["actor"] == "controller"
    held = await why_held(connection, name) if is_new and not was_tried else None
    if held is not None:
        share = control.now
    if control.version == version:
        share = None
    for serving in await versions_in_states(connection, name, "serving"):
        is_control = control.version is None or was_tried
        if is_control:
            await _set_control(connection, name, share=None)
        taken = f"{new.served_name} took the traffic"
        its_share = share if is_control else None
        await change_state(
            connection, serving, "retired", share=its_share, reason=taken, actor=why["actor"]
        )
    await _set_control(connection, name, share=share)
    await change_state(connection, new, "serving", **why)
    if held is not None:
        await _set_columns(connection, name, version, frozen_at=func.clock_timestamp())
        await add_event(connection, name, version, "serving", **why | {"reason": held})
    overtaken = f"{new.served_name} serves, and is newer"
    for older in await versions_in_states(connection, name, *STATES_WITHOUT_TRAFFIC, "canary"):
        if older.version < version:
            await change_state(connection, older, "retired", reason=overtaken, actor=why["actor"])
    if why["actor"] == "operator":
        # The operator may have repaired something: earlier episodes must not be compared with it.
        await _set_control(connection, name, changed_at=func.clock_timestamp())


async def _set_control(connection: AsyncConnection, name: str, **values: Any) -> None:
    """Set columns of the control, if there is one; a `share` of None ends its role."""
    control = (policies.c.name == name, text(CONTROL))
    await connection.execute(update(policies).where(*control).values(**values))


async def move_control(
    connection: AsyncConnection, name: str, version: int, share: float, **why: Unpack[Why]
) -> None:
    """Make a retired version the control, with this share of new episodes."""
    await _set_control(connection, name, share=None)
    await _set_columns(connection, name, version, share=share or None)
    await add_event(connection, name, version, "retired", **why)


async def await_approval(
    connection: AsyncConnection, tried: PolicyVersion, **why: Unpack[Why]
) -> None:
    """Mark a version as waiting, in its present state, until a person promotes or rejects it."""
    await _set_columns(
        connection, tried.name, tried.version, awaits_approval_at=func.clock_timestamp()
    )
    await add_event(connection, tried.name, tried.version, tried.state, **why)


async def hold_training(
    connection: AsyncConnection, serving: PolicyVersion, share: float, **why: Unpack[Why]
) -> None:
    """Hold training on the serving version; its control gets `share` of new episodes.

    The hold ends as soon as another version serves, unless a trainer was already making that one.
    """
    await _set_columns(connection, serving.name, serving.version, frozen_at=func.clock_timestamp())
    await _set_control(connection, serving.name, share=share)
    await add_event(connection, serving.name, serving.version, serving.state, **why)


async def resume_training(connection: AsyncConnection, name: str, **why: Unpack[Why]) -> None:
    """End a hold of training, if there is one, and restart the watch of the serving version."""
    for row in (await connection.execute(_END_HOLD, {"name": name})).all():
        await add_event(connection, name, row.version, row.state, **why)
        await restart_watch(connection, name)


async def restart_watch(connection: AsyncConnection, name: str) -> None:
    """Compare the serving version with its control from now on, as its rule says.

    Without a control, the version that a roll-back would return to becomes the control.
    """
    await connection.execute(_RESTART_WATCH, {"name": name})


async def promote_together(
    connection: AsyncConnection, names: Sequence[str]
) -> list[PolicyVersion]:
    """Promote the loaded versions of these policies together, if it is due; return the versions.

    It is due if every policy has a loaded version, or if one version has waited for the
    `wait_for_others_s` of its rule; else return []. Several controllers may call this at the same
    time. Frozen policies, and versions that wait to be judged or approved, are left out.
    """
    loaded: Sequence[Any] = ()
    # Nothing is locked until it is due: the partners' new versions must not have to wait.
    for is_locked in (False, True):
        if is_locked:
            await lock_policies(connection, names)
        loaded = (await connection.execute(_TO_PROMOTE_TOGETHER, {"names": list(names)})).all()
        are_all = {row.name for row in loaded} == set(names)
        if not (are_all or any(row.has_waited for row in loaded)):
            return []
    why = "it is loaded"
    if not are_all:
        wait_s = next(row.wait_s for row in loaded if row.has_waited)
        why = f"it has waited for {wait_s or 0.0:g} s for others to go live with"
    for row in loaded:
        await promote(connection, row.name, row.version, reason=why, actor="controller")
    return [version_of(row) for row in loaded]


async def renew_rules(connection: AsyncConnection, name: str, rule: Mapping[str, Any]) -> None:
    """Give a policy's written versions `rule` (`add_version`), and loaded ones its waiting rule.

    The waiting rule says with which policies' versions one goes live, and how long it waits for
    them.
    """
    await lock_policies(connection, [name])
    await connection.execute(_RENEW_RULES, {"name": name, "rule": json.dumps(dict(rule))})


# Judging


async def rejudge_versions(
    connection: AsyncConnection, name: str, units: Mapping[str, Any], *, actor: Actor
) -> None:
    """Judge a policy's versions by changed rewards, and restart the running comparisons.

    `units` are the values of `reward`, `reward_range` and `margin` to set in the versions' rules.
    """
    await lock_policies(connection, [name])
    values = {"name": name, "units": json.dumps(dict(units))}
    why = "the reward changed: comparisons restart with new episodes"
    for row in (await connection.execute(_JUDGE_BY, values)).all():
        if row.state in ("canary", "retired"):
            await add_event(connection, name, row.version, row.state, reason=why, actor=actor)


async def freeze(
    connection: AsyncConnection, name: str, *, frozen: bool, reason: str, actor: Actor
) -> None:
    """Let only operators move the policy's traffic; if not `frozen`, let every actor move it again.

    Ending the freeze also ends a hold of training.

    Raises:
        UnknownPolicy: there is no such policy.
    """
    base = await lock_version(connection, name, 0)
    await _set_columns(connection, name, 0, frozen_at=text("now()") if frozen else None)
    why = f"{'frozen' if frozen else 'no longer frozen'}: {reason}"
    if not frozen:
        await resume_training(connection, name, reason=why, actor=actor)
    await add_event(connection, name, 0, base.state, reason=why, actor=actor)


# Unloading and roll-back


async def mark_unloaded(
    connection: AsyncConnection,
    name: str,
    numbers: Collection[int],
    reason: str,
    actor: Actor,
    *,
    is_lost: bool = False,
) -> set[int]:
    """Mark retired and rolled-back versions as unloaded; return the numbers of those marked.

    Versions in other states stay loaded. So do the control and the version that a roll-back would
    return to, unless no server can load them any more (`is_lost`).
    """
    if not numbers:
        return set()
    await lock_policies(connection, [name])
    values = {"name": name, "numbers": list(numbers), "is_lost": is_lost}
    rows = (await connection.execute(_UNLOAD, values)).all()
    for row in rows:
        await add_event(connection, name, row.version, row.state, reason=reason, actor=actor)
    return {row.version for row in rows}


async def recall(connection: AsyncConnection, name: str, version: int, **why: Unpack[Why]) -> None:
    """Let the servers load a retired version again, so that it can be promoted.

    A version that is still loaded stays loaded.

    Raises:
        UnknownPolicy: there is no such version.
        StateChanged: it is not retired, or it ended, or its files were deleted.
    """
    await lock_policies(connection, [name])
    old = await lock_version(connection, name, version)
    if old.state != "retired" or old.ended or old.files_deleted:
        raise StateChanged(
            f"{old.served_name} cannot be loaded again: only a retired version can, of the policy's"
            " present line, while its files are there; export an adapter, and import it, which"
            " makes it a version of its own"
        )
    if old.unloaded:
        await _set_columns(
            connection, name, version, unloaded_at=None, changed_at=func.clock_timestamp()
        )
        await add_event(connection, name, version, old.state, **why)


async def roll_back(
    connection: AsyncConnection, version: PolicyVersion, **why: Unpack[Why]
) -> PolicyVersion | None:
    """Roll back a version that serves, is tried, loaded or written: no new episode begins with it.

    With the serving version, all versions that served since the control are rolled back, and the
    control serves again; without a control, the last one that served before and is still loaded, or
    the base model. Return the version that serves again, or None if `version` did not serve.
    Descendants of rolled-back versions are rolled back, too. Versions without traffic so far
    are rejected instead. Episodes that use a rolled-back version keep it, and are not trained on.

    Raises:
        StateChanged: the version has another state by now; nothing was written.
        WrongVersionState: the version has lost the traffic already, or is the base model.
    """
    name, number = version.name, version.version
    if version.state not in ("written", "loaded", "canary", "serving") or not number:
        raise WrongVersionState(
            f"{name}@{number} is {version.state!r}: only a trained version in state 'written',"
            " 'loaded', 'canary' or 'serving' can be rolled back"
        )
    await lock_policies(connection, [name])
    now = await lock_version(connection, name, number)
    if now.state != version.state:
        raise StateChanged(
            f"{name}@{number} is {now.state!r} by now, and not {version.state!r}, so it was not"
            f" rolled back ({why['reason']}): decide again"
        )
    serves = version.state == "serving"
    served = f"it served since the control did, like {name}@{number}, which was rolled back"
    reasons = {"served": served, "descends": f"it descends from {name}@"}
    values = {"name": name, "version": number, "serves": serves, **reasons}
    await connection.execute(_ROLL_BACK, values | _event_values(why))
    if not serves:
        return None
    target = await rollback_target(connection, name)
    again = f"{name}@{number} was rolled back: {why['reason']}"
    await promote(connection, name, target.version, reason=again, actor=why["actor"])
    return await numbered_version(connection, name, target.version)
