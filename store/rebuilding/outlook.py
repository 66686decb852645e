"""Look at what a rebuild of a policy would do, before anything is changed."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final
from uuid import UUID

from sqlalchemy import or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import UnknownPolicy
from store.lineage import head_of
from store.rebuilding.choosing import Query, matching_episodes
from store.rebuilding.leaving import waiting_of
from store.rebuilding.line import Done, Line, PastRow, done_of, line_of, row_of
from store.records import Record
from store.retaining.outdated import LOST_CALLS
from store.schema.recorded import OF_A_VERSION, WITHOUT_LOGPROBS
from store.schema.trained import LEFT_OUT, REBUILT, consumptions, updates
from store.updates.claims import IMPORTED_FROM
from store.version_queries import numbered_version
from store.versions import PolicyVersion

DELETED: Final = "deleted"
CALLS_DROPPED: Final = "calls_dropped"
VERSION_GONE: Final = "version_gone"
# Why an episode that these updates consumed cannot be read as it was. The last is about calls whose
# log-probabilities the version that sampled them computed; a learner that imitates needs none, and
# an update that could not have them already recorded so.
_MISSING: Final = text(
    f"""
    SELECT c.update_id, c.episode_id, CASE WHEN e.deleted_at IS NOT NULL THEN '{DELETED}'
        WHEN e.quarantined_reason = :lost_calls THEN '{CALLS_DROPPED}'
        ELSE '{VERSION_GONE}' END AS why
    FROM consumptions c JOIN episodes e ON e.id = c.episode_id JOIN updates u ON u.id = c.update_id
    WHERE c.policy = :policy AND c.update_id = ANY(:updates)
        AND c.reason IS DISTINCT FROM '{LEFT_OUT}'
        AND (e.deleted_at IS NOT NULL OR e.quarantined_reason = :lost_calls
            OR (c.trained AND u.recipe ->> 'learner' IS DISTINCT FROM 'sft' AND EXISTS (
                SELECT FROM episodes p JOIN transitions t ON t.episode_id = p.id
                JOIN policies v ON (v.name, v.version) = (t.policy, t.policy_version)
                WHERE (p.id = e.id OR p.root = e.id) AND t.policy = :policy
                    AND t.{OF_A_VERSION} AND {WITHOUT_LOGPROBS}
                    AND v.files_deleted_at IS NOT NULL
                    AND NOT COALESCE(u.metrics -> 'lost_versions', '{{}}')
                        ? CAST(v.version AS text))))
    ORDER BY c.update_id, c.episode_id
    """
)


class Missing(Record, frozen=True, kw_only=True):
    """Name an episode that an update was trained on, and that cannot be read as it was any more.

    `why` is `deleted`, `calls_dropped`, or `version_gone`: the log-probabilities of some calls were
    computed, and the files of the version that did are deleted.
    """

    update_id: UUID
    episode_id: UUID
    why: str


class Outlook(Record, frozen=True, kw_only=True):
    """Say what a rebuild of a policy would do.

    Attributes:
        head: the version that the policy's line has come to.
        line: the updates to do again.
        left_out: what to leave out of each update, by its id; what earlier rebuilds left out, too.
        chosen: all episodes that the queries select.
        waiting: those of them that no update has claimed.
        missing: episodes of the line that cannot be read any more, and are not left out.
        done: how far the line is rebuilt already, the furthest way first.
    """

    head: PolicyVersion
    line: Line
    left_out: Mapping[UUID, Set[UUID]]
    chosen: frozenset[UUID]
    waiting: tuple[UUID, ...]
    missing: tuple[Missing, ...]
    done: tuple[Done, ...]

    @property
    def of_line(self) -> int:
        """Return how many episodes of the line are left out."""
        return sum(len(self.left_out.get(item.source.id, ())) for item in self.line.items)


async def outlook(
    connection: AsyncConnection,
    policy: str,
    queries: Sequence[Query],
    *,
    leave_missing: bool = False,
) -> Outlook:
    """Look at a rebuild of `policy` without what the queries select; nothing is changed.

    With `leave_missing` the episodes that cannot be read any more are left out, too.

    Raises:
        UnknownPolicy: there is no such policy.
        UnknownNames: no episode has a name that is asked for.
    """
    base = await numbered_version(connection, policy, 0)
    if base is None:
        raise UnknownPolicy(
            f"there is no policy {policy!r}, or nothing was ever trained for it: `pawl policies"
            " list` names those that there are"
        )
    head = await head_of(connection, policy)
    chosen = await matching_episodes(connection, policy, base.tenant, queries)
    rows = await past_rows(connection, policy)
    line = line_of(rows, head.version)
    missing = await _missing(connection, policy, line, chosen)
    if leave_missing:
        chosen |= {one.episode_id for one in missing}
        missing = []
    left_out = await _left_out(connection, policy, chosen)
    return Outlook(
        head=head,
        line=line,
        left_out=left_out,
        chosen=frozenset(chosen),
        waiting=tuple(await waiting_of(connection, policy, chosen)),
        missing=tuple(missing),
        done=done_of(line, rows, left_out),
    )


async def past_rows(connection: AsyncConnection, policy: str) -> list[PastRow]:
    """Return the finished updates of a policy in the order of their claims."""
    own = updates.c
    query = (
        select(
            *(own.id, own.parent_version, own.version),
            own.metrics.has_key(IMPORTED_FROM).label("imported"),
            own.metrics[REBUILT].label("rebuilt"),
            own.baselines.is_not(None).label("has_baselines"),
        )
        .where(updates.c.policy == policy, updates.c.state == "done")
        .order_by(updates.c.claimed_at, updates.c.id)
    )
    return [row_of(row) for row in await connection.execute(query)]


async def _missing(
    connection: AsyncConnection, policy: str, line: Line, chosen: Set[UUID]
) -> list[Missing]:
    values: dict[str, Any] = {
        "policy": policy,
        "updates": [item.source.id for item in line.items],
        "lost_calls": LOST_CALLS,
    }
    rows = await connection.execute(_MISSING, values)
    found_missing = [
        Missing(update_id=row.update_id, episode_id=row.episode_id, why=row.why) for row in rows
    ]
    return [one for one in found_missing if one.episode_id not in chosen]


async def _left_out(
    connection: AsyncConnection, policy: str, chosen: Set[UUID]
) -> dict[UUID, frozenset[UUID]]:
    """Return the episodes to leave out, those of earlier rebuilds among them, by update."""
    columns = (consumptions.c.update_id, consumptions.c.episode_id)
    asked = or_(consumptions.c.episode_id.in_(chosen), consumptions.c.reason == LEFT_OUT)
    query = select(*columns).where(consumptions.c.policy == policy, asked)
    by_update: dict[UUID, set[UUID]] = {}
    for row in await connection.execute(query):
        by_update.setdefault(row.update_id, set()).add(row.episode_id)
    return {update_id: frozenset(ids) for update_id, ids in by_update.items()}
