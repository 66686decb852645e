"""Compare returns and normalise the differences (pure).

    advantage of a call = (final − baseline of finals) / max(s, SMALLEST_SPREAD)
                        + f · (air − baseline of airs) / max(s, AIR_SPREAD)

The recipe names the baseline, which final rewards and AIR each have of their own, and the
normalisation that gives `s`, the spread of the *final* rewards (`trainer.credit.baselines`). Both
lower limits are shares of the width of the reward's range. AIR is not divided by its own spread:
among episodes that all fail that spread is small, and the division would undo the limit on AIR.

`f` falls from 1 to 0 as the compared episodes succeed (`trainer.credit.air.air_weight`); with the
normalisation "focal" the first term has it, too.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Final

from store.records import Record
from store.tenants import task_family
from trainer.credit.air import RewardRange, air_weight
from trainer.credit.baselines import (
    BASELINES,
    NORMALISATIONS,
    BaselineValue,
    NoSignal,
    family_value,
    spread_about,
)
from trainer.credit.means import mean_of
from trainer.credit.moving import MovingBaselines
from trainer.credit.returns import CallReturn, EpisodeAccount
from trainer.recipes.recipe import CreditOptions

# Lower limit of the spread that differences of final rewards are divided by, as a share of the
# width of the reward's range.
SMALLEST_SPREAD: Final = 0.1
# The same of AIR: without any spread, AIR weighs air_lambda / AIR_SPREAD of a success.
AIR_SPREAD: Final = 0.5


class EpisodeReturns(Record, frozen=True, kw_only=True):
    """Hold an episode with the return of each of its calls, and the number of its group."""

    group: int
    account: EpisodeAccount
    returns: tuple[CallReturn, ...]


class AdvantageSteps(Record, frozen=True, kw_only=True):
    """Hold the steps from a call's return to its advantage, `value`.

    `final` and `air` are the differences of final reward and AIR from their baselines, less the
    update's mean difference where the normalisation centres them. `is_alike` says that all of the
    group have earned the same, so that the baseline is the family's.
    """

    baseline: float
    final: float
    divisor: float
    final_weight: float
    air_baseline: float
    air: float
    air_divisor: float
    air_weight: float
    is_alike: bool = False

    @property
    def value(self) -> float:
        """Return the sum of both scaled and weighted differences."""
        of_final = self.final_weight * self.final / self.divisor
        return of_final + self.air_weight * self.air / self.air_divisor


class Advantage(Record, frozen=True, kw_only=True):
    """Hold a call's advantage, and what came to it.

    `value` is None if nobody scored the call, and 0 if the comparison gives no signal; `reason`
    says why it gives none. `comparison` is None if the call was compared with nothing.
    """

    value: float | None
    reason: NoSignal | None
    comparison: AdvantageSteps | None = None

    @property
    def air_weight(self) -> float:
        """Return what AIR counted for."""
        return 1.0 if self.comparison is None else self.comparison.air_weight


UNSCORED: Final = Advantage(value=None, reason=None)


class ScoredCalls(Record, frozen=True, kw_only=True):
    """Hold the scored calls that are compared as one: an episode's, or those of one of its agents.

    `episode` is the episode's index in the update, `positions` are those of the calls in the
    episode, and `finals` and `airs` are the calls' returns, in the order of `positions`. Those of
    the same group and agent are compared with each other.
    """

    episode: int
    group: int
    family: str
    agent: str
    positions: tuple[int, ...]
    finals: tuple[float, ...]
    airs: tuple[float, ...]


def advantages(
    episodes: Sequence[EpisodeReturns],
    rule: CreditOptions,
    before: MovingBaselines,
    reward_range: RewardRange,
) -> tuple[list[list[Advantage]], MovingBaselines]:
    """Return the advantages of an update's calls, and the moving baselines after the update.

    Advantages are ordered by episode, then by call. `before` are the moving baselines that the
    last update left; they are returned unchanged if the recipe's baseline compares no episodes.
    """
    units = [
        unit
        for index, episode in enumerate(episodes)
        for unit in _scored_calls(index, episode, rule)
    ]
    after = before
    if rule.compares_episodes:
        finals: dict[tuple[str, str], list[float]] = {}
        airs: dict[tuple[str, str], list[float]] = {}
        for unit in units:
            if episodes[unit.episode].account.earlier:
                continue
            finals.setdefault((unit.family, unit.agent), []).append(mean_of(unit.finals))
            airs.setdefault((unit.family, unit.agent), []).append(mean_of(unit.airs))
        after = before.updated(finals, airs)
    low, high = reward_range
    earned = [final for unit in units for final in unit.finals]
    # A reward outside the range widens it: else all that is above it would be equally good.
    against = _compared(units, rule, after, (min([low, *earned]), max([high, *earned])))
    scaled = _scaled(units, against, rule, high - low)
    result = [[UNSCORED] * len(episode.returns) for episode in episodes]
    for unit, other, compared in zip(units, against, scaled, strict=True):
        # No signal, unless final rewards or AIR give one.
        air_tells = other.air.reason is None and other.weight > 0.0
        reason = other.final.reason
        reason = None if air_tells and reason != "alone" else reason
        for position, one in zip(unit.positions, compared, strict=True):
            result[unit.episode][position] = Advantage(
                value=one.value if reason is None else 0.0, reason=reason, comparison=one
            )
    return result, after.pruned()


class Against(Record, frozen=True, kw_only=True):
    """Hold what the final rewards and the AIR of some calls are compared with.

    `weight` is `f`, and `is_alike` is that of their comparisons.
    """

    final: BaselineValue
    air: BaselineValue
    weight: float
    is_alike: bool


def _scaled(
    units: Sequence[ScoredCalls], against: Sequence[Against], rule: CreditOptions, width: float
) -> list[list[AdvantageSteps]]:
    """Return the scaled differences of each call, in the order of `units`.

    `width` is that of the reward's range.
    """
    normalisation = NORMALISATIONS[rule.normalisation]
    pairs = list(zip(units, against, strict=True))
    finals = [[value - other.final.value for value in unit.finals] for unit, other in pairs]
    airs = [[value - other.air.value for value in unit.airs] for unit, other in pairs]
    by_baseline = normalisation.spread_over == "baseline"
    spreads = [other.final.spread if by_baseline else None for other in against]
    if normalisation.spread_over == "update":
        counts = [other.final.reason != "alone" for other in against]
        finals, airs = _centred(finals, counts), _centred(airs, counts)
        spreads = [spread_about(0.0, list(compress(finals, counts)))] * len(finals)
    return [
        [
            AdvantageSteps(
                baseline=other.final.value,
                final=final,
                divisor=_divisor(spread, width * SMALLEST_SPREAD),
                final_weight=other.weight if normalisation.is_focal else 1.0,
                air_baseline=other.air.value,
                air=air,
                air_divisor=_divisor(spread, width * AIR_SPREAD),
                air_weight=other.weight,
                is_alike=other.is_alike,
            )
            for final, air in zip(own, own_airs, strict=True)
        ]
        for own, own_airs, spread, other in zip(finals, airs, spreads, against, strict=True)
    ]


def _centred(differences: list[list[float]], counts: Sequence[bool]) -> list[list[float]]:
    """Return the differences of episodes minus the mean over those that count."""
    means = [mean_of(own) for own in compress(differences, counts)]
    mean = mean_of(means) if means else 0.0
    return [[difference - mean for difference in own] for own in differences]


def _divisor(spread: float | None, least: float) -> float:
    return 1.0 if spread is None else max(spread, least)


def _scored_calls(index: int, episode: EpisodeReturns, rule: CreditOptions) -> list[ScoredCalls]:
    if episode.account.earlier and not rule.compares_episodes:
        # Only a group's own statistics have a use for an episode that is consumed already.
        return []
    by_agent = rule.assignment == "per_agent"
    family = task_family(episode.account.task)
    scored: dict[str, list[tuple[int, float, float]]] = {}
    for position, call in enumerate(episode.returns):
        if call.r_final is not None:
            agent = episode.account.calls[position].agent if by_agent else ""
            scored.setdefault(agent, []).append((position, call.r_final, call.r_air))
    return [
        ScoredCalls(
            episode=index,
            group=episode.group,
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
    rule: CreditOptions,
    moving: MovingBaselines,
    reward_range: RewardRange,
) -> list[Against]:
    """Return what each unit is compared with, in the order of `units`.

    That is its group, or its family's moving average if it is alone in its group, or if all of the
    group have earned the same: where a task fails each time, only others can say by how much.
    """
    baseline = BASELINES[rule.baseline]
    compared: dict[tuple[int, str], list[int]] = {}
    for index, unit in enumerate(units):
        compared.setdefault((unit.group, unit.agent), []).append(index)
    by_index: dict[int, Against] = {}
    for indices in compared.values():
        own = [units[index] for index in indices]
        is_alone = len(own) == 1
        is_alike = baseline.needs_group and len({f for unit in own for f in unit.finals}) == 1
        if is_alike or (baseline.needs_group and is_alone):
            family, agent = own[0].family, own[0].agent
            average = moving.of_finals(family, agent)
            finals = [family_value(unit.finals, average) for unit in own]
            airs = [family_value(unit.airs, moving.of_airs(family, agent)) for unit in own]
            weight = air_weight([average.mean], reward_range)
        else:
            finals = baseline.values([unit.finals for unit in own])
            airs = baseline.values([unit.airs for unit in own])
            weight = air_weight([mean_of(unit.finals) for unit in own], reward_range)
        for index, final, air in zip(indices, finals, airs, strict=True):
            by_index[index] = Against(
                final=final, air=air, weight=weight, is_alike=is_alike and not is_alone
            )
    return [by_index[index] for index in range(len(units))]
