"""Show why calls are worth what they are, line by line: the arithmetic of `pawl credit`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.console.pages import figure
from pawl.credit import ExplainedUpdate, explain_update
from store.errors import Damaged, UnknownUpdate
from store.read.detail import is_explainable
from store.records import Record, Tokens
from trainer.credit.assign import TransitionCredit
from trainer.credit.means import mean_of
from trainer.errors import TrainerError
from trainer.recipes.recipe import CreditOptions


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

    `weights` are their shares of the update's loss, in their order.
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
        return ", ".join(f"{one}" if one == end else f"{one} to {end}" for one, end in pairs)


class Explanation(NamedTuple):
    """Hold the credit that an update gave, without the texts of its calls.

    Of each group, `groups` has the task, the members, and how many earlier ones were compared.
    """

    rule: CreditOptions
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
    finals: dict[UUID, list[float]] = {}
    for credit in explained.credited:
        compared = credit.episode_id in members if task else credit.episode_id == episode
        if compared and credit.r_final is not None:
            finals.setdefault(credit.episode_id, []).append(credit.r_final)
    returns = [mean_of(values) for values in finals.values()]
    same: dict[tuple[Any, ...], list[TransitionCredit]] = {}
    for credit in own:
        figures = (credit.r_final, credit.r_air, credit.comparison, credit.advantage)
        same.setdefault((*figures, credit.reason, *credit.parts.items()), []).append(credit)
    return [
        Worth(
            calls=tuple(number_of.get(credit.call.id, credit.position + 1) for credit in alike),
            weights=tuple(credit.weight for credit in alike),
            reason=alike[0].reason,
            share=_SHARES[explained.rule.equal_weight],
            steps=tuple(_steps(alike[0], explained.rule, returns, earlier)),
        )
        for alike in same.values()
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


# Who looks at an episode looks at its calls and its group too.
_RECENT: Final[dict[UUID, tuple[float, Explanation]]] = {}
KEPT: Final = 4
KEPT_S: Final = 60.0


async def explained_for(
    connection: AsyncConnection, update_id: UUID
) -> tuple[Explanation | None, str]:
    """Return the credit of an update, or why it cannot be shown; a minute later, computed anew."""
    made, explanation = _RECENT.get(update_id, (0.0, None))
    if explanation is not None and time.monotonic() - made < KEPT_S:
        return explanation, ""
    if not await is_explainable(connection, update_id):
        return None, f"it is too large to compute here: run `pawl credit --update {update_id}`"
    try:
        explanation = _without_texts(await explain_update(connection, update_id))
    except (UnknownUpdate, TrainerError, Damaged) as error:
        return None, str(error)
    _RECENT.pop(update_id, None)
    _RECENT[update_id] = time.monotonic(), explanation
    while len(_RECENT) > KEPT:
        _RECENT.pop(next(iter(_RECENT)))
    return explanation, ""


def _without_texts(explained: ExplainedUpdate) -> Explanation:
    replace = msgspec.structs.replace
    return Explanation(
        rule=explained.recipe.credit,
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
