"""Make episodes sentinels of a judge: those that are named, or a sample of what it scored."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.judging.errors import JudgeError
from pawl.judging.sentinels.shown import digest_of_line, sentinel_line
from store.deleting.choosing import named
from store.errors import Damaged
from store.judge.sentinels import Sentinel, add_sentinels, renew, sample, sentinels_of
from store.read.episodes import read_episodes
from store.records import REWARD, Record
from store.tenants import bare, scoped, tenant_of

# So many episodes are locked in one transaction: who trains on them, or settles feedback, waits.
AT_ONCE: Final = 100


class Choice(Record, frozen=True, kw_only=True):
    """Say which episodes become sentinels: `names` of the judge's tenant, or a sample.

    `number`, `seed` and `policy` are those of `store.judge.sentinels.sample`.
    """

    names: tuple[str, ...] = ()
    number: int = 0
    seed: int = 0
    metric: str = REWARD
    policy: str | None = None


async def add(engine: AsyncEngine, judge: str, choice: Choice, draws: int) -> int:
    """Make the episodes of a choice sentinels of a judge; return how many were none before.

    If it is broken off, it can be repeated.

    Raises:
        JudgeError, Damaged: as `chosen`; nothing is added then.
    """
    async with engine.connect() as connection:
        episodes = await chosen(connection, judge, choice)
    new = 0
    for first in range(0, len(episodes), AT_ONCE):
        async with engine.begin() as connection:
            new += await add_sentinels(connection, judge, episodes[first : first + AT_ONCE], draws)
    return new


async def take_new_references(connection: AsyncConnection, judge: str) -> int:
    """Renew all sentinels of a judge, as their episodes are now; return how many there are.

    Raises:
        JudgeError: an episode cannot be read back.
    """
    ids = [one.episode_id for one in await sentinels_of(connection, judge)]
    try:
        return await renew(connection, judge, await as_shown(connection, ids, Choice()))
    except Damaged as error:
        damaged = " ".join(map(str, error.episodes)) or "EPISODE"
        raise JudgeError(
            f"{error}: it can be scored no more. Remove it with `pawl sentinels remove {damaged}`, "
            "and renew the others then; nothing is changed"
        ) from error


async def chosen(connection: AsyncConnection, judge: str, choice: Choice) -> list[Sentinel]:
    """Return the episodes of a choice as sentinels of a judge, whose name is as it is kept.

    Raises:
        JudgeError: a name is not recorded, or was deleted; or there is nothing to take a sample of.
        Damaged: an episode cannot be read back.
    """
    if choice.names:
        return await as_shown(connection, await named_ids(connection, judge, choice.names), choice)
    ids = await sample(
        connection,
        judge,
        choice.number,
        seed=choice.seed,
        metric=choice.metric,
        policy=choice.policy,
    )
    if not ids:
        raise JudgeError(
            f"judge {bare(judge)!r} has stated {choice.metric} of no episode that could become a "
            "sentinel: check --judge, --metric and --policy, or name episodes instead of --sample"
        )
    return await as_shown(connection, ids, choice)


async def named_ids(connection: AsyncConnection, judge: str, names: Sequence[str]) -> list[UUID]:
    """Return the ids of episodes of the judge's tenant.

    Raises:
        JudgeError: a name is not recorded, or was deleted.
    """
    episodes = await named(connection, [scoped(tenant_of(judge), name) for name in names])
    missing = [*episodes.unknown, *episodes.deleted_before]
    if missing:
        shown = ", ".join(repr(bare(name))[:80] for name in missing[:5])
        raise JudgeError(
            f"{len(missing)} episodes are not recorded, or were deleted ({shown}): correct the "
            "names, or leave them out; nothing is changed"
        )
    return list(episodes.wholes)


async def as_shown(
    connection: AsyncConnection, ids: Sequence[UUID], choice: Choice
) -> list[Sentinel]:
    """Return these episodes as the judge would be shown them now; those that are gone are left out.

    Raises:
        Damaged: an episode cannot be read back.
    """
    sentinels = []
    for one in ids:
        # One at a time: an episode may take as much memory as a model's context.
        for episode in await read_episodes(connection, [one]):
            digest = digest_of_line(sentinel_line(episode))
            sentinels.append(Sentinel(episode_id=one, digest=digest, metric=choice.metric))
    return sentinels
