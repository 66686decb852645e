"""Choose the groups of the next update, of those that are ready.

Groups whose final rewards are all equal teach nothing, or little (AIR may differ), and do not make
an update: they are taken along, or by themselves, and so consumed
(docs/decisions/018-groups.md). A learner that imitates successes waits for
groups with one instead (docs/decisions/023-ppo.md).
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from store.updates.faults import and_not_aside
from store.updates.ready import Backlog, ClaimRule
from store.updates.rolled_back import and_not_rolled_back


async def find_ready(
    connection: AsyncConnection, rule: ClaimRule, oldest: int, *, takes_most: bool = False
) -> list[UUID]:
    """Select and lock the episodes of the next update; return none while there are too few.

    `oldest` is the first version whose episodes may be trained. With `takes_most` there are up to
    `rule.most_groups` groups.
    """
    most = (takes_most and rule.most_groups) or rule.groups
    backlog = await _backlog(connection, rule, oldest, most)
    rows = chosen_groups(await backlog.first(), rule)
    return await backlog.lock_members(rows) if rows else []


async def _backlog(connection: AsyncConnection, rule: ClaimRule, oldest: int, most: int) -> Backlog:
    but = await and_not_aside(connection, rule.policy)
    but += await and_not_rolled_back(connection, rule.policy)
    values = {"policy": rule.policy, "oldest": oldest, "groups": most}
    return Backlog(connection, rule, but, values)


def chosen_groups(rows: Sequence[Any], rule: ClaimRule) -> Sequence[Any]:
    """Return the groups to take, in their order: none while there are too few."""
    if _enough([row for row in rows if row.has_signal], rule):
        return rows
    without = [row for row in rows if not row.has_signal]
    return without if _enough(without, rule) else []


def _enough(rows: Sequence[Any], rule: ClaimRule) -> bool:
    waited = any(row.age_s >= rule.max_age_s for row in rows)
    return bool(rows) and (len(rows) >= rule.groups or waited)
