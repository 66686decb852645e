"""Show why calls are worth what they are: the arithmetic of `pawl credit`, a row for each step."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from starlette.requests import Request

from pawl.console.pages import reading, viewer
from pawl.credit import explain_past
from store.errors import Damaged, UnknownUpdate
from store.read.detail import is_explainable
from store.read.past import PastUpdate, past_update
from store.records import Tokens
from trainer.credit.assign import TransitionCredit
from trainer.credit.means import mean_of
from trainer.errors import TrainerError
from trainer.recipes.recipe import CreditOptions, OffPolicyOptions


class Compared(NamedTuple):
    """Name what an attempt is compared within, and count those of it that were consumed earlier."""

    task: str
    group: int | UUID
    earlier: int


class Explanation(NamedTuple):
    """Hold the credit that an update gave, without the texts of its calls."""

    rule: CreditOptions
    off_policy: OffPolicyOptions
    metrics: Mapping[str, Any]
    notes: Sequence[str]
    credited: Sequence[TransitionCredit]
    compared: Mapping[UUID, Compared]


class Worth(NamedTuple):
    """Hold the numbers, shares of the loss and credit of calls whose arithmetic is equal.

    `returns` are what they are compared with: those of attempts, or of the agent in each.
    """

    calls: str
    weights: Sequence[float]
    credit: TransitionCredit
    returns: Sequence[float]
    earlier: int


def worth_of(
    explained: Explanation, is_wanted: Callable[[TransitionCredit, str], bool]
) -> list[Worth]:
    """Return the credit of the wanted calls; it is asked about each, and about its task."""
    by_agent = explained.rule.assignment == "per_agent"
    returns: dict[Any, dict[UUID, list[float]]] = {}
    alike: dict[Any, list[TransitionCredit]] = {}
    for credit in explained.credited:
        episode = credit.episode_id
        compared = explained.compared[episode], credit.call.agent if by_agent else ""
        if credit.r_final is not None:
            of_episodes = returns.setdefault(compared, {})
            of_episodes.setdefault(episode, []).append(credit.r_final)
        if is_wanted(credit, compared[0].task):
            figures = (credit.r_final, credit.r_air, credit.comparison, credit.advantage)
            parts = tuple(credit.parts.items())
            key = (compared, episode, *figures, credit.reason, parts)
            alike.setdefault(key, []).append(credit)
    return [
        Worth(
            calls=ranges_of([credit.position + 1 for credit in own]),
            weights=[credit.weight for credit in own],
            credit=own[0],
            returns=[mean_of(values) for values in returns.get(compared, {}).values()],
            earlier=compared[0].earlier,
        )
        for (compared, *_), own in alike.items()
    ]


def ranges_of(numbers: Sequence[int]) -> str:
    """Return ascending numbers, those that follow each other as a range."""
    known = set(numbers)
    starts = [number for number in numbers if number - 1 not in known]
    ends = [number for number in numbers if number + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{start}" if start == end else f"{start} to {end}" for start, end in pairs)


# Who looks at an episode looks at its calls and its group too; several look at once.
_RECENT: Final[dict[tuple[str | None, UUID], tuple[float, asyncio.Task[Explanation]]]] = {}
KEPT: Final = 4
KEPT_S: Final = 60.0


async def explained_for(request: Request, update_id: UUID) -> tuple[Explanation | None, str]:
    """Return the credit of an update, or why it cannot be shown; a minute later, computed anew.

    It takes a connection of its own: the caller should hold none.
    """
    tenant, now = viewer(request).tenant, time.monotonic()
    made, computing = _RECENT.pop((tenant, update_id), (now, None))
    if computing is None or now - made > KEPT_S:
        made, computing = now, asyncio.create_task(_explained(request, update_id, tenant))
    _RECENT[tenant, update_id] = made, computing
    while len(_RECENT) > KEPT:
        _RECENT.pop(next(iter(_RECENT)))
    try:
        return await asyncio.shield(computing), ""
    except (UnknownUpdate, TrainerError, Damaged) as error:
        return None, str(error)
    finally:
        if computing.done() and (computing.cancelled() or computing.exception()):
            _RECENT.pop((tenant, update_id), None)


async def _explained(request: Request, update_id: UUID, tenant: str | None) -> Explanation:
    async with reading(request) as connection:
        if not await is_explainable(connection, update_id):
            raise UnknownUpdate(
                f"it is too large to compute here: run `pawl credit --update {update_id}`"
            )
        past = await past_update(connection, update_id, tenant=tenant)
    return await asyncio.to_thread(_without_texts, past)


def _without_texts(past: PastUpdate) -> Explanation:
    explained, replace = explain_past(past), msgspec.structs.replace
    return Explanation(
        rule=explained.recipe.credit,
        off_policy=explained.recipe.off_policy,
        metrics=past.metrics,
        notes=explained.notes,
        credited=[
            replace(credit, call=replace(credit.call, request=None, reply=None, tokens=Tokens()))
            for credit in explained.plan.credited
        ],
        compared={
            episode.id: Compared(
                group.task, place if group.task else episode.id, len(group.earlier)
            )
            for place, group in enumerate(past.claim.groups)
            for episode in group.episodes
        },
    )
