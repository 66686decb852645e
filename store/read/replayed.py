"""Choose recorded calls for a candidate to answer: held-out ones, and some not trained on lately.

The choice is a function of the candidate and of what was recorded before it: by the hash of both,
so that each candidate is asked something else, and whoever chooses again chooses the same. What is
asked is read at the time of asking, so that nothing is sent that was deleted meanwhile.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import exists, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.read.episodes import is_of, whole_calls
from store.records import EVAL, TRAIN, Record, Split
from store.schema.tables import consumptions, episode_policies, episodes, updates
from store.values.packing import unpack_ids
from store.versions import PolicyVersion

# The newest so many episodes of a split are drawn from: older ones say less about today's traffic,
# and all of them would be too many to look at.
NEWEST: Final = 2000
# One call of each episode: one that the trainer could compute again, so that its ids are exact.
_CALLS: Final = text(
    """
    SELECT id FROM (
        SELECT DISTINCT ON (e.id) t.id, md5(t.id::text || :salt) AS place
        FROM episodes e JOIN transitions t ON t.episode_id = e.id AND t.policy = :policy
            AND t.trainable AND t.id BETWEEN e.first_call_id AND e.last_call_id AND t.id < :before
        WHERE e.id = ANY(CAST(:newest AS uuid[]))
        ORDER BY e.id, place, t.id) one_each
    ORDER BY place, id LIMIT :most
    """
)
_THERE: Final = text(
    """
    SELECT t.id FROM transitions t JOIN episodes e ON e.id = t.episode_id
        JOIN episodes whole ON whole.id = COALESCE(e.root, e.id)
    WHERE t.id = ANY(CAST(:calls AS uuid[])) AND t.trainable
        AND COALESCE(e.quarantined_reason, whole.quarantined_reason) IS NULL
        AND COALESCE(e.deleted_at, whole.deleted_at) IS NULL
    """
)


class Chosen(Record, frozen=True, kw_only=True):
    """Name a call that a candidate is to answer; `split` says whether it is of evaluation."""

    call: UUID
    split: Split


class ReplayedCall(Record, frozen=True, kw_only=True):
    """Hold a recorded call as it is answered again: its prompt's ids, and its request's JSON.

    `request` is None if it was not kept.
    """

    prompt_ids: tuple[int, ...]
    request: bytes | None


async def chosen_calls(
    connection: AsyncConnection,
    candidate: PolicyVersion,
    serving: int,
    before: datetime,
    most: int,
) -> list[Chosen]:
    """Choose at most `most` calls of the candidate's policy, half of them held out if there are.

    They are of its tenant, and were made before `before`. The others are of episodes that the
    candidate, and what lies between it and version `serving`, was not trained on.
    """
    held_out = await _chosen(connection, candidate, serving, before, EVAL, most)
    others = await _chosen(connection, candidate, serving, before, TRAIN, most)
    first = held_out[: max(most // 2, most - len(others))]
    return [
        *(Chosen(call=one, split=EVAL) for one in first),
        *(Chosen(call=one, split=TRAIN) for one in others[: most - len(first)]),
    ]


async def replayed_calls(
    connection: AsyncConnection, calls: Sequence[UUID]
) -> dict[UUID, ReplayedCall]:
    """Return these calls by id, but for those that were deleted or quarantined since.

    What cannot be read back is left out, too.
    """
    there = list((await connection.execute(_THERE, {"calls": list(calls)})).scalars())
    return {
        call: ReplayedCall(prompt_ids=tuple(unpack_ids(prompt_ids)), request=request)
        for call, (request, prompt_ids) in (await whole_calls(connection, there)).items()
    }


async def _chosen(
    connection: AsyncConnection,
    candidate: PolicyVersion,
    serving: int,
    before: datetime,
    split: Split,
    most: int,
) -> Sequence[UUID]:
    trained_on = exists().where(
        consumptions.c.episode_id == episodes.c.id,
        consumptions.c.policy == candidate.name,
        consumptions.c.trained,
        consumptions.c.update_id == updates.c.id,
        updates.c.version > serving,
        updates.c.version <= candidate.version,
    )
    newest = (
        select(episodes.c.id)
        .join(episode_policies, episode_policies.c.episode_id == episodes.c.id)
        .where(
            episode_policies.c.policy == candidate.name,
            episodes.c.id < lowest_id_at(before),
            is_of(candidate.tenant),
            func.coalesce(episodes.c.joined_split, episodes.c.split) == split,
            episodes.c.root.is_(None),
            episodes.c.quarantined_reason.is_(None),
            episodes.c.deleted_at.is_(None),
            ~trained_on,
        )
        .order_by(episodes.c.id.desc())
        .limit(NEWEST)
    )
    values = {
        "newest": list((await connection.execute(newest)).scalars()),
        "policy": candidate.name,
        "salt": f"@{candidate.version}",
        "before": lowest_id_at(before),
        "most": most,
    }
    return list((await connection.execute(_CALLS, values)).scalars())
