"""Find the versions whose files nothing can ask for any more, and mark them as deleted.

And find those that a roll-back may give the traffic to, whose files must stay for it.
"""

from collections.abc import Collection, Sequence
from typing import Final

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.read.pages import version_of
from store.records import Record
from store.schema.claimable import FREE
from store.schema.recorded import WITHOUT_LOGPROBS
from store.schema.trained import policies
from store.updates.descent import DESCENDANTS
from store.updates.gating import version_before
from store.updates.policies import WITH_HASH, idle_versions
from store.versions import UNSERVED, PolicyVersion

# Versions with a call in a free episode that an update would ask for log-probabilities again
# (docs/decisions/042-without-log-probabilities.md), from an index of such calls alone: what waits
# may be a hundred thousand episodes.
_WAITED_FOR: Final = text(
    f"""
    SELECT asked.version FROM unnest(CAST(:versions AS integer[])) AS asked (version)
    WHERE EXISTS (
        SELECT FROM transitions t JOIN episodes e ON e.id = t.episode_id
        JOIN episode_policies w ON w.episode_id = COALESCE(e.root, e.id) AND w.policy = :policy
        WHERE t.policy = :policy AND t.policy_version = asked.version
            AND {WITHOUT_LOGPROBS} AND {FREE})
    """
)
# What the traffic may go back to (`store.updates.gating`): each version counts once in the order in
# which versions last got the traffic, whether its files are there or not.
# What was made of one that was rolled back cannot.
_ONCE_SERVED: Final = text(
    f"""
    {DESCENDANTS.format(of="rolled_back_at IS NOT NULL")},
    served AS (
        SELECT version, rank() OVER (ORDER BY max(at) DESC, version DESC) AS place
        FROM policy_events WHERE name = :name AND to_state = 'serving' AND version > 0
        GROUP BY version)
    SELECT version, place FROM policies JOIN served USING (version)
    WHERE name = :name AND state IN ('published', 'retired') AND rolled_back_at IS NULL
        AND files_deleted_at IS NULL AND version NOT IN (SELECT version FROM built)
    ORDER BY place
    """
)
_SERVING: Final = text(
    "SELECT * FROM policies WHERE name = :name AND state = 'serving' AND version > 0"
)
_RUNNING: Final = text(
    "SELECT EXISTS (SELECT FROM updates WHERE policy = :policy AND state = 'running')"
)


async def versions_with_files(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the versions of policy `name` (None: of every policy) whose files were not deleted.

    They are in the order of name and version, the base model's among them. Nothing else can be
    asked for, and there are few of these, however many versions there were.
    """
    query = select(*WITH_HASH).where(policies.c.files_deleted_at.is_(None))
    if name is not None:
        query = query.where(policies.c.name == name)
    rows = await connection.execute(query.order_by(policies.c.name, policies.c.version))
    return [version_of(row) for row in rows]


async def deleted_versions(
    connection: AsyncConnection, name: str, asked: Collection[int]
) -> set[int]:
    """Return those of the versions `asked` for whose files were deleted."""
    query = select(policies.c.version).where(
        policies.c.name == name,
        policies.c.version.in_(asked),
        policies.c.files_deleted_at.is_not(None),
    )
    return set((await connection.execute(query)).scalars())


class OnceServed(Record, frozen=True, kw_only=True):
    """Describe a version that had the traffic, and may get it back.

    `place` is its place among all that had it, by when they last got it: the one that serves has 1,
    unless that is the base model.
    """

    version: int
    place: int


class ToGoBackTo(Record, frozen=True, kw_only=True):
    """Hold the versions that a roll-back may give the traffic to, of those whose files are there.

    `before` would serve if what serves were rolled back (0: the base model). `served` are all that
    had the traffic and did not fail, the last first. What served before events were kept has no
    place: it stays as long as it is published.
    """

    before: int
    served: Sequence[OnceServed]


async def to_go_back_to(connection: AsyncConnection, name: str) -> ToGoBackTo:
    """Return what a roll-back of the policy may give the traffic to."""
    values = {"name": name}
    serving = (await connection.execute(_SERVING, values)).first()
    before = 0
    if serving is not None:
        before = (await version_before(connection, version_of(serving))).version
    rows = await connection.execute(_ONCE_SERVED, values)
    served = [OnceServed(version=row.version, place=row.place) for row in rows]
    return ToGoBackTo(before=before, served=served)


async def unasked_versions(
    connection: AsyncConnection, name: str, keep: Collection[int], idle_s: float
) -> list[PolicyVersion]:
    """Return the versions of a policy whose files are there and no reader is left for.

    They are retired or rejected and not in `keep`; they had no change of state and no call for
    `idle_s` seconds; and no free episode waits for their log-probabilities. There are none while
    an update of the policy is running.
    """
    if await connection.scalar(_RUNNING, {"policy": name}):
        return []
    idle = await idle_versions(connection, name, UNSERVED, idle_s)
    unasked = {one.version: one for one in idle if one.version not in keep}
    if not unasked:
        return []
    values = {"policy": name, "versions": list(unasked)}
    waited_for = set((await connection.execute(_WAITED_FOR, values)).scalars())
    return [one for number, one in unasked.items() if number not in waited_for]


async def mark_deleted(
    connection: AsyncConnection, name: str, versions: Collection[int]
) -> set[int]:
    """Mark the files of these versions as deleted; return those that could be marked.

    A version that was given another state meanwhile keeps its files.
    """
    marked = await connection.execute(
        update(policies)
        .where(
            policies.c.name == name,
            policies.c.version.in_(versions),
            policies.c.state.in_(UNSERVED),
        )
        .values(files_deleted_at=text("now()"))
        .returning(policies.c.version)
    )
    return set(marked.scalars())
