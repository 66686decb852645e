"""Show why calls are worth what they are, line by line: the arithmetic of `pawl credit`."""

import math
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.credit import ExplainedUpdate, explain_update
from store.errors import Damaged, UnknownUpdate
from store.read.detail import is_explainable
from store.records import Record
from trainer.credit.assign import TransitionCredit
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


def worth_of(explained: ExplainedUpdate, episode: UUID) -> list[Worth]:
    """Return the credit of an episode's calls, those with equal arithmetic together."""
    own = [credit for credit in explained.plan.credited if credit.episode_id == episode]
    finals: dict[UUID, list[float]] = {}
    group = next((g for g in explained.past.claim.groups if _holds(g.episodes, episode)), None)
    members = {one.id for one in group.episodes} if group is not None and group.task else {episode}
    for credit in explained.plan.credited:
        if credit.episode_id in members and credit.r_final is not None:
            finals.setdefault(credit.episode_id, []).append(credit.r_final)
    returns = [math.fsum(own) / len(own) for own in finals.values()]
    earlier = len(group.earlier) if group is not None else 0
    same: dict[tuple[Any, ...], list[TransitionCredit]] = {}
    for credit in own:
        figures = (credit.r_final, credit.r_air, credit.comparison, credit.advantage)
        same.setdefault((*figures, credit.reason, *credit.parts.items()), []).append(credit)
    return [
        Worth(
            calls=tuple(credit.position + 1 for credit in alike),
            weights=tuple(credit.weight for credit in alike),
            reason=alike[0].reason,
            share=_SHARES[explained.recipe.credit.equal_weight],
            steps=tuple(_steps(alike[0], explained.recipe.credit, returns, earlier)),
        )
        for alike in same.values()
    ]


def _holds(episodes: Sequence[Any], wanted: UUID) -> bool:
    return any(one.id == wanted for one in episodes)


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
        shown = ", ".join(f"{one:.4g}" for one in returns[:16])
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
                how=f"{compared.air_weight:.4g} × ({credit.r_air:.4g} − "
                f"{compared.air_baseline:.4g}{centred}) ÷ {compared.air_divisor:.4g}",
                value=compared.air_weight * compared.air / compared.air_divisor,
            ),
        ]
    how = "difference ÷ spread + tools" if compared is not None else "compared with nothing"
    if compared is not None and credit.advantage != compared.value:
        how = "0: the comparison gives no signal"
    steps.append(Step(name="advantage", how=how, value=credit.advantage))
    return steps


async def explained_for(
    connection: AsyncConnection, update_id: UUID
) -> tuple[ExplainedUpdate | None, str]:
    """Return the credit of an update, or why it cannot be shown."""
    if not await is_explainable(connection, update_id):
        return None, f"it is too large to compute here: run `pawl credit --update {update_id}`"
    try:
        return await explain_update(connection, update_id), ""
    except (UnknownUpdate, TrainerError, Damaged) as error:
        return None, str(error)
