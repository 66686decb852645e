"""Choose the groups of the next update, of those that are ready.

Groups whose final rewards are all equal teach nothing, or little (AIR may differ), and do not make
an update: they are taken along, or by themselves, and so consumed
(docs/decisions/050-an-update-waits-for-signal.md). A learner that imitates successes waits for
groups with one instead (docs/decisions/060-sft.md). Where a recipe caps what one API key or one
task has of an update, what is more of it waits (docs/decisions/092-caps-per-key-and-per-task.md).
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from store.caps.choosing import Choosing, Past, Sizes
from store.caps.sources import Candidate, Kind, Source
from store.caps.waiting import capped_episodes, recall
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
    if not rows:
        return []
    if rule.caps:
        return await backlog.locked(await _within_caps(backlog, most))
    return await backlog.locked(await backlog.with_members(rows))


async def capped(connection: AsyncConnection, rule: ClaimRule, oldest: int) -> dict[Kind, int]:
    """Return how many episodes wait beyond what an update may take of their source.

    They are counted by kind of source, of those that the rule caps.
    """
    if not rule.caps:
        return {}
    backlog = await _backlog(connection, rule, oldest, rule.groups)
    ready, values = backlog.ready()
    sizes = rule.groups, rule.group_size
    return await capped_episodes(connection, rule.caps, sizes, ready, values)


async def _backlog(connection: AsyncConnection, rule: ClaimRule, oldest: int, most: int) -> Backlog:
    but = await and_not_aside(connection, rule.policy)
    but += await and_not_rolled_back(connection, rule.policy)
    values = {"policy": rule.policy, "oldest": oldest, "groups": most}
    return Backlog(connection, rule, but, values)


async def _within_caps(backlog: Backlog, most: int) -> list[Candidate]:
    """Return the groups to take of which no source has more than its cap."""
    rule = backlog.rule

    async def look(full: frozenset[Source]) -> list[Candidate]:
        return await backlog.with_members(await backlog.first(full), full)

    async def remember() -> Past:
        return await recall(backlog.connection, list(rule.caps), *backlog.ready())

    sizes = Sizes(
        groups=rule.groups, most=most, group_size=rule.group_size, max_age_s=rule.max_age_s
    )
    return await Choosing(rule.caps, sizes, look, remember).choose()


def chosen_groups(rows: Sequence[Any], rule: ClaimRule) -> Sequence[Any]:
    """Return the groups to take, in their order: none while there are too few."""
    if _enough([row for row in rows if row.has_signal], rule):
        return rows
    without = [row for row in rows if not row.has_signal]
    return without if _enough(without, rule) else []


def _enough(rows: Sequence[Any], rule: ClaimRule) -> bool:
    waited = any(row.age_s >= rule.max_age_s for row in rows)
    return bool(rows) and (len(rows) >= rule.groups or waited)
