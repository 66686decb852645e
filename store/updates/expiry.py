"""Consume episodes that can never be trained any more, so that they do not wait forever.

Each policy consumes such an episode once, in an update in state `expired` that does nothing else,
with a reason: `rolled_back` (sampled by a version that was), `stale` (sampled by an older version
than the recipe allows) or `aged` (without a call for longer than it allows). Scored and unscored
episodes expire alike, in short transactions.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at, new_id
from store.schema.claimable import FREE
from store.schema.trained import updates
from store.updates.consuming import consume_episodes
from store.updates.ready import ClaimRule, lock_free
from store.updates.rolled_back import REASON, rolled_back_episodes

MOST: Final = 1000

_OLDEST = text(
    """
    SELECT version FROM policies
    WHERE name = :policy AND version <= :parent AND rolled_back_at IS NULL AND ended_at IS NULL
        AND state IN ('serving', 'canary', 'published', 'retired')
    ORDER BY version DESC OFFSET :staleness LIMIT 1
    """
)
_STALE = text(
    f"""
    SELECT episode_id FROM episode_policies
    WHERE policy = :policy AND {FREE} AND version < :oldest
    ORDER BY version, episode_id LIMIT :most
    """
)
# One lookup per version, because each version is a range of the index. The episode's id is a
# UUIDv7, so comparing it limits the time at which the episode began.
_AGED = text(
    f"""
    SELECT a.episode_id FROM generate_series(CAST(:oldest AS integer), CAST(:newest AS integer)) v
    CROSS JOIN LATERAL (
        SELECT episode_id FROM episode_policies WHERE policy = :policy AND {FREE} AND version = v
            AND episode_id < CAST(:began_before AS uuid)
            AND last_call_at < now() - make_interval(secs => :age_s)
        ORDER BY episode_id LIMIT :most) a
    LIMIT :most
    """
)
# One array: a statement has no room for as many parameters as one retraining may leave out.
_CLAIM = text(
    """
    UPDATE episode_policies SET claimed_by = :update_id
    WHERE policy = :policy AND episode_id = ANY(CAST(:ids AS uuid[]))
    """
)


async def oldest_version(
    connection: AsyncConnection, policy: str, parent: int, max_staleness: int | None
) -> int:
    """Return the first version whose episodes an update of version `parent` may train on.

    Only versions that had traffic count, but for those that were rolled back or ended.
    """
    if max_staleness is None:
        return 0
    values = {"policy": policy, "parent": parent, "staleness": max_staleness}
    return int(await connection.scalar(_OLDEST, values) or 0)


async def expire(
    connection: AsyncConnection, rule: ClaimRule, parent: int, recipe: Mapping[str, Any]
) -> dict[str, int]:
    """Consume up to `MOST` episodes past `rule`'s limits; return their number by reason.

    The result is empty if there are none.
    """
    oldest = await oldest_version(connection, rule.policy, parent, rule.max_staleness)
    past_limits = await _past_limits(connection, rule, parent, oldest)
    free = await lock_free(connection, rule.policy, list(past_limits))
    reasons = {episode: reason for episode, reason in past_limits.items() if episode in free}
    return await consume_unclaimed(connection, rule.policy, parent, recipe, reasons, oldest=oldest)


async def consume_unclaimed(
    connection: AsyncConnection,
    policy: str,
    parent: int,
    recipe: Mapping[str, Any],
    reasons: Mapping[UUID, str],
    *,
    oldest: int = 0,
) -> dict[str, int]:
    """Consume free episodes, which the caller has locked, untrained; return their number by reason.

    An update in state `expired` does so, of version `parent`.
    """
    counted = dict(Counter(reasons.values()))
    if not counted:
        return {}
    update_id = new_id()
    await connection.execute(
        insert(updates).values(
            id=update_id,
            policy=policy,
            parent_version=parent,
            oldest_version=oldest,
            state="expired",
            recipe=dict(recipe),
            metrics={"episodes": len(reasons), "trained_episodes": 0, "dropped": counted},
            finished_at=text("now()"),
        )
    )
    await connection.execute(
        _CLAIM, {"update_id": update_id, "policy": policy, "ids": list(reasons)}
    )
    consumed = [(one, False, reason) for one, reason in reasons.items()]
    await consume_episodes(connection, update_id, consumed)
    return counted


async def _past_limits(
    connection: AsyncConnection, rule: ClaimRule, parent: int, oldest: int
) -> dict[UUID, str]:
    reasons = dict.fromkeys(await rolled_back_episodes(connection, rule.policy, MOST), REASON)
    values = {"policy": rule.policy, "oldest": oldest, "most": MOST - len(reasons)}
    stale = (await connection.execute(_STALE, values)).scalars()
    reasons = dict.fromkeys(stale, "stale") | reasons
    if rule.max_episode_age_s is not None and len(reasons) < MOST:
        age: dict[str, Any] = {
            "age_s": rule.max_episode_age_s,
            "newest": parent,
            "most": MOST - len(reasons),
        }
        now = await connection.scalar(text("SELECT now()"))
        age["began_before"] = lowest_id_at(now - timedelta(seconds=rule.max_episode_age_s))
        aged = (await connection.execute(_AGED, values | age)).scalars()
        reasons = dict.fromkeys(aged, "aged") | reasons
    return reasons
