"""Compare returns and normalise the differences (pure).

    advantage of a call = (final − baseline of finals) / max(s, SMALLEST_SPREAD)
                        + f · (air − baseline of airs) / max(s, AIR_SPREAD)

The recipe names the baseline, which final rewards and AIR each have of their own, and the
normalisation that gives `s`, the spread of the *final* rewards (`trainer.credit.baselines`). AIR is
not divided by its own spread: among episodes that all fail that spread is small, and the division
would undo the limit on AIR. `f` falls from 1 to 0 as the compared episodes succeed
(`trainer.credit.air.air_weight`).
"""

from collections.abc import Sequence
from typing import Final

from store.records import Record
from store.tenants import task_family
from trainer.credit.air import air_weight
from trainer.credit.baselines import (
    BASELINES,
    NORMALISATIONS,
    Baseline,
    BaselineValue,
    ComparedReturns,
    NoSignal,
)
from trainer.credit.means import mean_of
from trainer.credit.moving import MovingBaselines
from trainer.credit.returns import CallReturn, EpisodeAccount
from trainer.recipes.recipe import CreditOptions

# Lower limit of the spread that differences of final rewards are divided by, in reward units.
SMALLEST_SPREAD: Final = 0.1
# The same of AIR: without any spread, AIR weighs air_lambda / AIR_SPREAD of a success.
AIR_SPREAD: Final = 0.5


class EpisodeReturns(Record, frozen=True, kw_only=True):
    """Hold an episode with the return of each of its calls, and the number of its group."""

    group: int
    account: EpisodeAccount
    returns: tuple[CallReturn, ...]


class Comparison(Record, frozen=True, kw_only=True):
    """Hold the steps from a call's return to its advantage, `value`.

    `final` and `air` are the differences of final reward and AIR from their baselines, less the
    update's mean difference where the normalisation centres them.
    """

    baseline: float
    final: float
    divisor: float
    air_baseline: float
    air: float
    air_divisor: float
    air_weight: float

    @property
    def value(self) -> float:
        """Return the sum of both scaled differences."""
        return self.final / self.divisor + self.air_weight * self.air / self.air_divisor


class Advantage(Record, frozen=True, kw_only=True):
    """Hold a call's advantage, and what came to it.

    `value` is None if nobody scored the call, and 0 if the comparison gives no signal; `reason`
    says why it gives none. `comparison` is None if the call was compared with nothing.
    """

    value: float | None
    reason: NoSignal | None
    comparison: Comparison | None = None

    @property
    def air_weight(self) -> float:
        """Return what AIR counted for."""
        return 1.0 if self.comparison is None else self.comparison.air_weight


UNSCORED: Final = Advantage(value=None, reason=None)


class ScoredCalls(Record, frozen=True, kw_only=True):
    """Hold the scored calls that are compared as one: an episode's, or those of one of its agents.

    `episode` is the episode's index in the update, `positions` are those of the calls in the
    episode, and `finals` and `airs` are the calls' returns, in the order of `positions`. What has
    the same `compared_with` (a group, or a task family) and agent is compared with each other.
    """

    episode: int
    compared_with: int | str
    family: str
    agent: str
    positions: tuple[int, ...]
    finals: tuple[float, ...]
    airs: tuple[float, ...]


def advantages(
    episodes: Sequence[EpisodeReturns], rule: CreditOptions, before: MovingBaselines
) -> tuple[list[list[Advantage]], MovingBaselines]:
    """Return the advantages of an update's calls, and the moving baselines after the update.

    Advantages are ordered by episode, then by call. `before` are the moving baselines that the
    last update left; they are returned unchanged unless the recipe's baseline needs them.
    """
    baseline = BASELINES[rule.baseline]
    units = [
        unit
        for index, episode in enumerate(episodes)
        for unit in _scored_calls(index, episode, rule, baseline)
    ]
    after = before
    if baseline.needs_moving_averages:
        finals: dict[tuple[str, str], list[float]] = {}
        airs: dict[tuple[str, str], list[float]] = {}
        for unit in units:
            finals.setdefault((unit.family, unit.agent), []).append(mean_of(unit.finals))
            airs.setdefault((unit.family, unit.agent), []).append(mean_of(unit.airs))
        after = before.updated(finals, airs)
    against = _compared(units, baseline, before, after)
    result = [[UNSCORED] * len(episode.returns) for episode in episodes]
    for unit, (final, air, weight), compared in zip(
        units, against, _scaled(units, against, rule), strict=True
    ):
        # No signal, unless final rewards or AIR give one.
        air_tells = air.reason is None and weight > 0.0
        reason = None if air_tells and final.reason != "alone" else final.reason
        for position, one in zip(unit.positions, compared, strict=True):
            result[unit.episode][position] = Advantage(
                value=one.value if reason is None else 0.0, reason=reason, comparison=one
            )
    return result, after.pruned()


# What the final rewards and the AIR of some calls are compared with, and AIR's weight.
Against = tuple[BaselineValue, BaselineValue, float]


def _scaled(
    units: Sequence[ScoredCalls], against: Sequence[Against], rule: CreditOptions
) -> list[list[Comparison]]:
    """Return the scaled differences of each call, in the order of `units`."""
    normalisation = NORMALISATIONS[rule.normalisation]
    values = [final for final, _, _ in against]
    pairs = list(zip(units, against, strict=True))
    finals = normalisation.centred(
        [[value - final.value for value in unit.finals] for unit, (final, _, _) in pairs], values
    )
    airs = normalisation.centred(
        [[value - air.value for value in unit.airs] for unit, (_, air, _) in pairs], values
    )
    spreads = normalisation.spreads(finals, values)
    return [
        [
            Comparison(
                baseline=of_finals.value,
                final=final,
                divisor=_divisor(spread, SMALLEST_SPREAD),
                air_baseline=of_airs.value,
                air=air,
                air_divisor=_divisor(spread, AIR_SPREAD),
                air_weight=weight,
            )
            for final, air in zip(own, own_airs, strict=True)
        ]
        for own, own_airs, spread, (of_finals, of_airs, weight) in zip(
            finals, airs, spreads, against, strict=True
        )
    ]


def _divisor(spread: float | None, least: float) -> float:
    return 1.0 if spread is None else max(spread, least)


def _scored_calls(
    index: int, episode: EpisodeReturns, rule: CreditOptions, baseline: Baseline
) -> list[ScoredCalls]:
    if episode.account.earlier and not baseline.needs_group:
        # Only a group's own statistics have a use for an episode that is consumed already.
        return []
    by_agent = rule.assignment == "per_agent" or baseline.needs_moving_averages
    family = task_family(episode.account.task)
    scored: dict[str, list[tuple[int, float, float]]] = {}
    for position, call in enumerate(episode.returns):
        if call.r_final is not None:
            agent = episode.account.calls[position].agent if by_agent else ""
            scored.setdefault(agent, []).append((position, call.r_final, call.r_air))
    return [
        ScoredCalls(
            episode=index,
            compared_with=family if baseline.needs_moving_averages else episode.group,
            family=family,
            agent=agent,
            positions=tuple(position for position, _, _ in own),
            finals=tuple(final for _, final, _ in own),
            airs=tuple(air for _, _, air in own),
        )
        for agent, own in scored.items()
    ]


def _compared(
    units: Sequence[ScoredCalls],
    baseline: Baseline,
    before: MovingBaselines,
    after: MovingBaselines,
) -> list[Against]:
    """Return what each unit is compared with, in the order of `units`."""
    compared: dict[tuple[int | str, str], list[int]] = {}
    for index, unit in enumerate(units):
        compared.setdefault((unit.compared_with, unit.agent), []).append(index)
    by_index: dict[int, Against] = {}
    for indices in compared.values():
        own = [units[index] for index in indices]
        family, agent = own[0].family, own[0].agent
        finals = baseline.values(
            ComparedReturns(
                returns=tuple(unit.finals for unit in own),
                family=family,
                agent=agent,
                before=before,
                after=after,
            )
        )
        airs = baseline.values(
            ComparedReturns(
                returns=tuple(unit.airs for unit in own),
                family=family,
                agent=agent,
                before=before.of_airs(),
                after=after.of_airs(),
            )
        )
        weight = air_weight([mean_of(unit.finals) for unit in own])
        both = zip(finals, airs, strict=True)
        by_index |= {i: (*pair, weight) for i, pair in zip(indices, both, strict=True)}
    return [by_index[index] for index in range(len(units))]
