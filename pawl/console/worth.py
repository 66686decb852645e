"""Show why calls are worth what they are, line by line: the arithmetic of `pawl credit`."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from starlette.requests import Request

from pawl.console.pages import figure, reading, viewer
from pawl.credit import ExplainedUpdate, explain_past
from store.errors import Damaged, UnknownUpdate
from store.read.detail import MOST_CALLS, is_explainable
from store.read.past import past_update
from store.records import Record, Tokens
from trainer.credit.assign import TransitionCredit
from trainer.credit.means import mean_of
from trainer.errors import TrainerError
from trainer.recipes.recipe import CreditOptions, OffPolicyOptions


class Step(Record, frozen=True, kw_only=True):
    """Hold a line of arithmetic: a name, how it is computed, and what it comes to.

    The name of a metric (`is_metric`) is what somebody else chose.
    """

    name: str
    how: str
    value: float | None
    is_metric: bool = False


class Worth(Record, frozen=True, kw_only=True):
    """Hold calls, by their numbers, with the same advantage for the same reasons, and the lines.

    `weights` are their shares of the update's loss, in their order; of the last ones the numbers
    may not be known.
    """

    calls: tuple[int, ...]
    weights: tuple[float, ...]
    reason: str | None
    share: str
    steps: tuple[Step, ...]

    @property
    def numbers(self) -> str:
        """Return the numbers of the calls, those that follow each other as a range."""
        ends = [n for n in self.calls if n + 1 not in self.calls]
        starts = [n for n in self.calls if n - 1 not in self.calls]
        pairs = zip(starts, ends, strict=True)
        known = [f"{one}" if one == end else f"{one} to {end}" for one, end in pairs]
        later = len(self.weights) - len(self.calls)
        return ", ".join(known + [f"{later} after the first {MOST_CALLS:,}"] * (later > 0))


class Explanation(NamedTuple):
    """Hold the credit that an update gave, without the texts of its calls.

    Of each group, `groups` has the task, the members, and how many earlier ones were compared.
    """

    rule: CreditOptions
    off_policy: OffPolicyOptions
    metrics: Mapping[str, Any]
    notes: Sequence[str]
    credited: Sequence[TransitionCredit]
    groups: Sequence[tuple[str, frozenset[UUID], int]]


def worth_of(explained: Explanation, episode: UUID, number_of: Mapping[UUID, int]) -> list[Worth]:
    """Return the credit of an episode's calls, those with equal arithmetic together.

    `number_of` has the numbers of its calls.
    """
    own = [credit for credit in explained.credited if credit.episode_id == episode]
    nobody = "", frozenset[UUID](), 0
    groups = (group for group in explained.groups if episode in group[1])
    task, members, earlier = next(groups, nobody)
    by_agent = explained.rule.assignment == "per_agent"
    finals: dict[str, dict[UUID, list[float]]] = {}
    for credit in explained.credited:
        compared = credit.episode_id in members if task else credit.episode_id == episode
        if compared and credit.r_final is not None:
            of_agent = finals.setdefault(credit.call.agent if by_agent else "", {})
            of_agent.setdefault(credit.episode_id, []).append(credit.r_final)
    returns = {
        agent: [mean_of(values) for values in of_agent.values()]
        for agent, of_agent in finals.items()
    }
    same: dict[tuple[Any, ...], list[TransitionCredit]] = {}
    for credit in own:
        agent = credit.call.agent if by_agent else ""
        figures = (agent, credit.r_final, credit.r_air, credit.comparison, credit.advantage)
        same.setdefault((*figures, credit.reason, *credit.parts.items()), []).append(credit)
    return [
        Worth(
            calls=tuple(
                number_of[credit.call.id] for credit in alike if credit.call.id in number_of
            ),
            weights=tuple(credit.weight for credit in alike),
            reason=alike[0].reason,
            share=_SHARES[explained.rule.equal_weight],
            steps=tuple(_steps(alike[0], explained.rule, returns.get(agent, []), earlier)),
        )
        for (agent, *_), alike in same.items()
    ]


_BASELINES: Final = {
    "group": "mean of the attempts",
    "leave_one_out": "mean of the other attempts",
    "moving": "moving average of its kind of task",
    "none": "nothing",
}
_SPREADS: Final = {"group": "the spread of the attempts", "batch": "the spread of the update"}
_SHARES: Final = {
    "episode": "each episode counts the same, and each of its trained calls",
    "call": "each trained call counts the same",
    "token": "each sampled token counts the same",
}


def _steps(
    credit: TransitionCredit, rule: CreditOptions, returns: Sequence[float], earlier: int
) -> list[Step]:
    """Return the lines from what was stated to the advantage."""
    steps = [
        Step(name=metric, how="part of the reward", value=one, is_metric=True)
        for metric, one in credit.parts.items()
    ]
    by = {
        "identical": "the episode's",
        "per_agent": "its agent's",
        "call": "its own, or the episode's",
    }
    steps.append(Step(name="reward", how=by[rule.assignment], value=credit.r_final))
    compared = credit.comparison
    how = f"{rule.air_lambda:g} × mean score of how its tools ended"
    steps.append(Step(name="tools", how=how, value=credit.r_air))
    if compared is not None:
        shown = ", ".join(map(figure, returns[:16]))
        more = f", and {earlier} consumed earlier" if earlier else ""
        against = f" ({shown}{more})" if rule.baseline in ("group", "leave_one_out") else ""
        centred = " − the update's mean" if rule.normalisation == "batch" else ""
        steps += [
            Step(
                name="baseline",
                how=_BASELINES.get(rule.baseline, rule.baseline) + against,
                value=compared.baseline,
            ),
            Step(
                name="difference",
                how="reward − baseline"
                + (" − the update's mean" if rule.normalisation == "batch" else ""),
                value=compared.final,
            ),
            Step(
                name="divided by",
                how=_SPREADS.get(rule.normalisation, "nothing"),
                value=compared.divisor,
            ),
            Step(
                name="tools, compared",
                how=f"{figure(compared.air_weight)} × ({figure(credit.r_air)} − "
                f"{figure(compared.air_baseline)}{centred}) ÷ {figure(compared.air_divisor)}",
                value=compared.air_weight * compared.air / compared.air_divisor,
            ),
        ]
    how = "difference ÷ spread + tools" if compared is not None else "compared with nothing"
    if compared is not None and credit.advantage != compared.value:
        how = "0: the comparison gives no signal"
    steps.append(Step(name="advantage", how=how, value=credit.advantage))
    return steps


# Who looks at an episode looks at its calls and its group too; several look at once.
_Key = tuple[str | None, UUID]
_Found = tuple[Explanation | None, str]
_RECENT: Final[dict[_Key, tuple[float, Explanation]]] = {}
_COMPUTING: Final[dict[_Key, asyncio.Task[_Found]]] = {}
KEPT: Final = 4
KEPT_S: Final = 60.0


async def explained_for(request: Request, update_id: UUID) -> _Found:
    """Return the credit of an update, or why it cannot be shown; a minute later, computed anew.

    It takes a connection of its own: the caller should hold none.
    """
    key = viewer(request).tenant, update_id
    made, explanation = _RECENT.get(key, (0.0, None))
    if explanation is not None and time.monotonic() - made < KEPT_S:
        return explanation, ""
    if key not in _COMPUTING:
        _COMPUTING[key] = asyncio.create_task(_explain(request, key))
        _COMPUTING[key].add_done_callback(lambda _: _COMPUTING.pop(key))
    return await asyncio.shield(_COMPUTING[key])


async def _explain(request: Request, key: _Key) -> _Found:
    tenant, update_id = key
    try:
        async with reading(request) as connection:
            if not await is_explainable(connection, update_id):
                return (
                    None,
                    f"it is too large to compute here: run `pawl credit --update {update_id}`",
                )
            past = await past_update(connection, update_id, tenant=tenant)
        explanation = await asyncio.to_thread(lambda: _without_texts(explain_past(past)))
    except (UnknownUpdate, TrainerError, Damaged) as error:
        return None, str(error)
    _RECENT.pop(key, None)
    _RECENT[key] = time.monotonic(), explanation
    while len(_RECENT) > KEPT:
        _RECENT.pop(next(iter(_RECENT)))
    return explanation, ""


def _without_texts(explained: ExplainedUpdate) -> Explanation:
    replace = msgspec.structs.replace
    return Explanation(
        rule=explained.recipe.credit,
        off_policy=explained.recipe.off_policy,
        metrics=explained.past.metrics,
        notes=explained.notes,
        credited=[
            replace(one, call=replace(one.call, request=None, reply=None, tokens=Tokens()))
            for one in explained.plan.credited
        ],
        groups=[
            (group.task, frozenset(one.id for one in group.episodes), len(group.earlier))
            for group in explained.past.claim.groups
        ],
    )
