"""Change the states of policy versions, each change with an event that gives its reason.

Nothing else writes a version's state: `change_state` does so and adds the event in one statement,
so that neither is there without the other (docs/decisions/077-states-events-and-arms.md).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import insert, null, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import RolledBack, StateChanged, UnknownPolicy
from store.ids import new_id
from store.read.pages import version_of
from store.schema.trained import policies, policy_events
from store.versions import Actor, PolicyState, PolicyVersion

# What a version that was rolled back may still become.
_AFTER_ROLL_BACK: Final = ("rolled_back", "retired")
# One that was rolled back keeps its share, by which it is known that it was a canary. Whoever moves
# traffic has locked the policy by then, so that the times of events are in the order of the moves,
# and not in that in which transactions began.
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
_LOCK: Final = text(
    "SELECT name FROM policies WHERE version = 0 AND name = ANY(CAST(:names AS text[]))"
    " ORDER BY name FOR NO KEY UPDATE"
)


async def lock_policies(connection: AsyncConnection, names: Sequence[str]) -> None:
    """Let nobody else move traffic between versions of these policies until the transaction ends.

    What is read afterwards is what there is then.
    """
    await connection.execute(_LOCK, {"names": sorted(names)})


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

    `evidence` is what the decision rested on; it is stored as JSON. There is no change, and no
    event, to the state that it has.

    Raises:
        StateChanged: it has another state by now; nothing was written.
        RolledBack: it was rolled back, so it cannot have that state any more.
    """
    if to == version.state:
        return
    if version.rolled_back and to not in _AFTER_ROLL_BACK:
        raise RolledBack(
            f"{version.name}@{version.version} was rolled back, so it cannot become {to!r}: "
            "nothing brings it back; import its adapter as a version of its own"
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


async def note_rolled_back(
    connection: AsyncConnection, version: PolicyVersion, *, reason: str, actor: Actor
) -> None:
    """Let a version that is `retired` count as rolled back: it stays so, and on no server.

    Raises:
        StateChanged: it has another state by now; nothing was written.
    """
    changed = await connection.execute(
        update(policies)
        .where(
            policies.c.name == version.name,
            policies.c.version == version.version,
            policies.c.state == "retired",
        )
        .values(rolled_back_at=text("now()"), changed_at=text("now()"))
    )
    if not changed.rowcount:
        raise StateChanged(
            f"{version.name}@{version.version} is not 'retired' any more, so it was not noted as"
            f" rolled back ({reason}): read its state, and decide again"
        )
    await add_event(
        connection,
        version.name,
        version.version,
        "retired",
        before="retired",
        reason=reason,
        actor=actor,
    )


async def judge_anew(
    connection: AsyncConnection, name: str, before: str, units: Mapping[str, Any], *, actor: Actor
) -> None:
    """Let a policy's candidates be judged by other rewards; a trial that is under way begins anew.

    `before` is the digest of what rewards were made by until now, `units` what replaces parts of
    the candidates' rules. What serves keeps its rule: it is not judged by rewards that it was not
    promoted for.
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
    """Move one version to `state`, whichever it has; `evidence` is as in `change_state`.

    Raises:
        UnknownPolicy: there is no such version.
        RolledBack: it was rolled back, so it cannot have that state any more.
    """
    held = await lock_version(connection, name, version)
    await change_state(connection, held, state, reason=reason, actor=actor, evidence=evidence)


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
    """Record why a version is in `state`, of which the caller takes care in this transaction.

    That is its first state, unless `before` is given; if that is the same, why it stays so.
    """
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
