"""Start a policy's line of versions again at an older version, and leave episodes out of it.

The trainer claims the freed episodes like any others (docs/decisions/079-retraining.md). An ended
version stays loaded for the episodes that began with it, but it never serves again, nothing is
trained from it, and it does not count for staleness. Its update counts as abandoned; the episodes
that it was trained on are kept in `freed_consumptions`, for the receipts of deletions.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claim_query import lock_episodes
from store.claims import consume_unclaimed, release, running_update
from store.errors import WrongVersionState
from store.records import Record
from store.version_queries import list_live
from store.version_states import (
    Why,
    add_event,
    change_state,
    lock_policies,
    lock_version,
    promote,
    restart_watch,
)
from store.versions import Actor

LEFT_OUT: Final = "left_out"

_UPDATES_AFTER: Final = """
    SELECT id FROM updates WHERE policy = :policy AND claimed_at > COALESCE((
        SELECT claimed_at FROM updates WHERE policy = :policy AND version = :version),
        to_timestamp(0))
"""
# The episodes of finished updates after the version, trained or not, and stale ones. Episodes that
# were consumed untrained for other reasons stay consumed.
_TO_FREE: Final = f"""
    SELECT c.episode_id FROM consumptions c JOIN updates u ON u.id = c.update_id
    JOIN episode_policies p ON (p.episode_id, p.policy) = (c.episode_id, c.policy)
    WHERE u.id IN ({_UPDATES_AFTER}) AND (u.state = 'done' OR c.reason = 'stale') AND p.claimable
"""
_TO_LOCK: Final = f"""
    {_TO_FREE} UNION SELECT unnest(CAST(:ids AS uuid[]))
    UNION SELECT p.episode_id FROM episode_policies p JOIN updates u ON u.id = p.claimed_by
        WHERE u.policy = :policy AND u.state = 'running'
"""
_CONSUMPTION: Final = "episode_id, policy, update_id, trained, reason, at"
_FREE: Final = f"""
    WITH freed AS (
        DELETE FROM consumptions WHERE policy = :policy AND episode_id IN ({_TO_FREE})
        RETURNING {_CONSUMPTION}),
    kept AS (INSERT INTO freed_consumptions ({_CONSUMPTION}) SELECT {_CONSUMPTION} FROM freed)
    UPDATE episode_policies p SET claimed_by = NULL FROM freed
    WHERE (p.episode_id, p.policy) = (freed.episode_id, freed.policy)
    RETURNING COALESCE(freed.reason, 'trained')
"""
_ABANDON: Final = f"""
    UPDATE updates SET state = 'abandoned',
        metrics = metrics || jsonb_build_object('abandoned', CAST(:why AS text))
    WHERE id IN ({_UPDATES_AFTER}) AND state = 'done'
"""
_LEARNED: Final = f"""
    SELECT count(*) FROM consumptions WHERE policy = :policy AND trained
        AND episode_id = ANY(CAST(:ids AS uuid[])) AND update_id NOT IN ({_UPDATES_AFTER})
"""
_UNCLAIMED: Final = """
    SELECT episode_id FROM episode_policies WHERE policy = :policy AND claimed_by IS NULL
        AND episode_id = ANY(CAST(:ids AS uuid[])) ORDER BY episode_id
"""
_END: Final = """
    UPDATE policies SET ended_at = now(), share = NULL
    WHERE name = :policy AND version > :version AND ended_at IS NULL RETURNING version
"""
_LAST_RECIPE: Final = (
    "SELECT recipe FROM updates WHERE policy = :policy ORDER BY claimed_at DESC, id DESC LIMIT 1"
)


class Retrained(Record, frozen=True, kw_only=True):
    """The result of starting a policy's line again.

    Attributes:
        serves: the version that the new line starts at; `served` had the traffic before.
        freed: how many episodes may be claimed again, by `trained` or why they were not trained.
        left_out: how many freed and waiting episodes were left out.
        learned: how many of the episodes to leave out were used to train `serves` or an earlier
            version, which still knows them.
        abandoned: the running update that lost its claim, if any.
        ended: how many versions ended.
        max_staleness: the limit in the last recipe: once the new line has more versions than that,
            waiting episodes of the old line expire. None: they never do.
    """

    serves: str
    served: str
    freed: Mapping[str, int]
    left_out: int
    learned: int
    abandoned: UUID | None = None
    ended: int = 0
    max_staleness: int | None = None


async def retrain(
    connection: AsyncConnection,
    policy: str,
    version: int,
    left_out: Collection[UUID],
    *,
    reason: str,
    actor: Actor,
) -> Retrained:
    """Start the line of `policy` again at `version`, which every server must have loaded.

    Later versions end, and the episodes of their updates are free again, but those in `left_out`
    are consumed untrained. A running update is abandoned: its trainer finds that the claim is lost.
    The control stays unless it ends; then the version that a roll-back would return to becomes the
    control.

    Raises:
        UnknownPolicy: there is no such version.
        WrongVersionState: nothing was trained for the policy yet.
        StateChanged, RolledBack: `version` cannot serve (`version_states.promote`).
    """
    values: dict[str, Any] = {"policy": policy, "version": version, "ids": list(left_out)}

    async def run(query: str, **more: Any) -> list[Any]:
        return list((await connection.execute(text(query), values | more)).scalars())

    await lock_policies(connection, [policy])
    start = await lock_version(connection, policy, version)
    if not (recipes := await run(_LAST_RECIPE)):
        raise WrongVersionState(
            f"nothing was trained for policy {policy!r} yet: there is no version to end"
        )
    why = f"the line starts again at {policy}@{version}: {reason}"
    await lock_episodes(connection, await run(_TO_LOCK))
    if (running := await running_update(connection, policy)) is not None:
        await release(connection, running, why)
    freed = Counter(await run(_FREE))
    await connection.execute(text(_ABANDON), values | {"why": why})
    reasons = dict.fromkeys(await run(_UNCLAIMED), LEFT_OUT)
    await consume_unclaimed(connection, policy, version, recipes[0], reasons)
    live = await list_live(connection, policy)
    # Retire these before the promotion, so that no version that ends becomes the control.
    for later in live:
        if later.version > version and later.state not in ("retired", "rolled_back"):
            await change_state(connection, later, "retired", reason=why, actor=actor)
    retrained = Retrained(
        serves=start.served_name,
        served=next(former.served_name for former in live if former.state == "serving"),
        freed=dict(freed),
        left_out=len(reasons),
        learned=(await run(_LEARNED))[0],
        abandoned=running,
        ended=len(await run(_END)),
        max_staleness=recipes[0].get("claim", {}).get("max_staleness"),
    )
    evidence = {"retrain": msgspec.to_builtins(retrained)}
    event: Why = {"reason": why, "actor": actor, "evidence": evidence}
    if start.state == "serving":
        await add_event(connection, policy, version, "serving", **event)
    else:
        await promote(connection, policy, version, **event)
    await restart_watch(connection, policy)
    return retrained
