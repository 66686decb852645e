"""Keep what each policy may claim of an episode in step with the episode and its parts.

Every row of `episode_policies` is computed from all that is stored of its episode, so neither the
order of arrival nor a repetition changes it (docs/decisions/041-several-policies.md). Whoever
changes an episode does this in the same transaction, and so holds the lock on the episode's row.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import driver_of
from store.link.scores import score_sums
from store.records import CallRecord
from store.schema.tables import CLAIMABLE

_NAMES: Final = (
    "task",
    "scored_at",
    "call_scored_at",
    "reward",
    "failed",
    "last_call_at",
    "claimable",
)
# What a policy with a sum of its own does not copy (`store.link.scores`).
_EARNED: Final = ("scored_at", "call_scored_at", "reward")
_COPIED: Final = ", ".join(_NAMES)
_OF_ROW: Final = ", ".join(f"p.{name}" for name in _NAMES)


def _copied(policy: str, own: str) -> str:
    """Return the values of `_NAMES` for a policy: of the episode (`f`), or of `own` what it has."""
    return ", ".join(
        f"CASE WHEN {policy} IN (SELECT policy FROM reward_terms) THEN {own.format(name=name)}"
        f" ELSE f.{name} END"
        if name in _EARNED
        else f"f.{name}"
        for name in _NAMES
    )


_KEPT: Final = _copied("p.policy", "p.{name}")
# The last part of a joined episode decides whether the episode failed, and it is silent once all
# its parts are.
_FACTS: Final = f"""
    SELECT e.id, COALESCE(e.joined_task, e.task) AS task, e.scored_at, e.call_scored_at,
        e.reward,
        CASE WHEN l.last_call_id > e.last_call_id THEN l.failed ELSE e.failed END AS failed,
        GREATEST(e.last_call_at, l.last_call_at) AS last_call_at, {CLAIMABLE} AS claimable
    FROM episodes e LEFT JOIN LATERAL (
        SELECT max(p.last_call_at) AS last_call_at,
            (array_agg(p.last_call_id ORDER BY p.last_call_id DESC))[1] AS last_call_id,
            (array_agg(p.failed ORDER BY p.last_call_id DESC))[1] AS failed
        FROM episodes p WHERE e.linked AND p.root = e.id) l ON true
    WHERE e.id = ANY($1)
"""
_ADD: Final = f"""
    INSERT INTO episode_policies (episode_id, policy, own_version, own_latest, version, latest,
        {_COPIED})
    SELECT episode_id, policy, lowest, highest, lowest, highest, {_copied("policy", "NULL")}
    FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::integer[])
            AS said (episode_id, policy, lowest, highest)
        JOIN ({_FACTS}) f ON f.id = said.episode_id
    ON CONFLICT (episode_id, policy) DO UPDATE SET
        own_version = LEAST(episode_policies.own_version, excluded.own_version),
        own_latest = GREATEST(episode_policies.own_latest, excluded.own_latest),
        version = LEAST(episode_policies.version, excluded.version),
        latest = GREATEST(episode_policies.latest, excluded.latest)
    WHERE episode_policies.own_version IS NULL
        OR episode_policies.own_version > excluded.own_version
        OR episode_policies.own_latest < excluded.own_latest
    RETURNING episode_id, policy IN (SELECT policy FROM reward_terms) AS has_sum
"""
_REFRESH: Final = f"""
    UPDATE episode_policies p SET ({_COPIED}) = ROW({_KEPT}) FROM ({_FACTS}) f
    WHERE p.episode_id = f.id AND ({_OF_ROW}) IS DISTINCT FROM ({_KEPT})
"""
_WHOLES: Final = "SELECT DISTINCT COALESCE(root, id) FROM episodes WHERE id = ANY($1)"
# A whole has a row for each policy of any part of it.
_SHARE: Final = f"""
    INSERT INTO episode_policies (episode_id, policy, version, latest, {_COPIED})
    SELECT sampled.id, policy, version, latest, {_copied("policy", "NULL")}
    FROM (SELECT COALESCE(e.root, e.id) AS id, p.policy, min(p.own_version) AS version,
              max(p.own_latest) AS latest
          FROM episodes e JOIN episode_policies p ON p.episode_id = e.id
          WHERE (e.id = ANY($1) OR e.root = ANY($1)) AND p.own_version IS NOT NULL
          GROUP BY 1, 2) sampled
        JOIN ({_FACTS}) f ON f.id = sampled.id
    ON CONFLICT (episode_id, policy) DO UPDATE SET
        version = excluded.version, latest = excluded.latest
    WHERE (episode_policies.version, episode_policies.latest)
        <> (excluded.version, excluded.latest)
"""
# What an earlier join gave, and no part gives any longer.
_UNSHARE: Final = """
    DELETE FROM episode_policies p
    WHERE p.episode_id = ANY($1) AND p.own_version IS NULL AND p.claimed_by IS NULL
        AND NOT EXISTS (
            SELECT FROM episodes e JOIN episode_policies o ON o.episode_id = e.id
            WHERE e.root = p.episode_id AND o.policy = p.policy AND o.own_version IS NOT NULL)
"""


async def add_policies(
    driver: Any, calls: Iterable[tuple[CallRecord, UUID]], changed: list[UUID]
) -> None:
    """Add a row for each policy that served one of `calls`, and refresh those of `changed`.

    Args:
        driver: the driver's connection, in a transaction.
        calls: pairs of a call and its episode's id. A call without a version has no policy in
            training: an outside model served it, or one that is fixed.
        changed: the episodes that were stored before and are not linked to others.
    """
    served: defaultdict[tuple[UUID, str], list[int]] = defaultdict(list)
    for call, episode_id in calls:
        if call.policy is not None and call.policy_version is not None:
            served[episode_id, call.policy].append(call.policy_version)
    added = await driver.fetch(_ADD, *_columns(served)) if served else []
    if earning := [row[0] for row in added if row[1]]:
        # It may have been scored before this policy served a call of it.
        await score_sums(driver, earning)
    if changed:
        await driver.execute(_REFRESH, changed)


def _columns(
    served: Mapping[tuple[UUID, str], Sequence[int]],
) -> tuple[list[UUID], list[str], list[int], list[int]]:
    keys = sorted(served)
    lowest, highest = ([of(served[key]) for key in keys] for of in (min, max))
    return [one for one, _ in keys], [policy for _, policy in keys], lowest, highest


async def share_policies(driver: Any, linked: Iterable[UUID]) -> None:
    """Give each whole that these linked episodes make up the policies of all its parts."""
    ids = list(linked)
    await driver.execute(_UNSHARE, ids)
    await driver.execute(_SHARE, await _wholes(driver, ids))


async def refresh_wholes(driver: Any, ids: Iterable[UUID]) -> None:
    """Copy what is stored of these episodes, and of those that they are parts of, to their rows."""
    wanted = list(ids)
    ids = [*wanted, *await _wholes(driver, wanted)]
    await driver.execute(_REFRESH, ids)
    await score_sums(driver, ids)


async def _wholes(driver: Any, ids: list[UUID]) -> list[UUID]:
    return [row[0] for row in await driver.fetch(_WHOLES, ids)]


async def refresh(connection: AsyncConnection, ids: Iterable[UUID]) -> None:
    """Copy what is stored of these episodes to their rows."""
    driver, wanted = await driver_of(connection), list(ids)
    await driver.execute(_REFRESH, wanted)
    await score_sums(driver, wanted)
