"""Compare returns and normalise the differences (pure).

    advantage of a call = (final − baseline of finals) / max(s, SMALLEST_SPREAD)
                        + f · (air − baseline of airs) / max(s, AIR_SPREAD)

The recipe names the baseline, which is computed separately for final rewards and AIR, and the
normalisation, which gives `s`, the spread of the *final* rewards (`trainer.credit.baselines`). Both
lower limits are shares of the width of the reward range. AIR is not divided by AIR's own spread:
that spread is small if all episodes fail, and the division would undo the limit on AIR.

`f` falls from 1 to 0 as more of the compared episodes succeed (`trainer.credit.air.air_weight`).
The normalisation "focal" multiplies the first term by `f`, too.
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
    family_baseline,
    spread_about,
)
from trainer.credit.means import mean_of
from trainer.credit.moving import MovingBaselines
from trainer.credit.returns import CallReturn, EpisodeAccount
from trainer.recipes.recipe import CreditOptions

# Lower limit of the spread that divides differences of final rewards, as a share of the width of
# the reward range.
SMALLEST_SPREAD: Final = 0.1
# Lower limit of the spread that divides differences of AIR, as a share of the same width. If final
# rewards have no spread, the largest r_air gives an advantage of air_lambda / AIR_SPREAD.
AIR_SPREAD: Final = 0.5


class EpisodeReturns(Record, frozen=True, kw_only=True):
    """An episode, the returns of its calls, and the number of its group."""

    group: int
    account: EpisodeAccount
    returns: tuple[CallReturn, ...]


class AdvantageSteps(Record, frozen=True, kw_only=True):
    """The steps from a call's return to its advantage, `value`.

    `final` and `air` are final reward and AIR minus their baselines; the normalisation "batch" also
    subtracts the update's mean difference. `is_alike` is true if all episodes of the group have the
    same final reward, so that the baseline is the family's moving average.
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
        """Return the advantage: `final` and `air`, each weighted and divided, added up."""
        of_final = self.final_weight * self.final / self.divisor
        return of_final + self.air_weight * self.air / self.air_divisor


class Advantage(Record, frozen=True, kw_only=True):
    """A call's advantage, and the steps by which it was computed.

    `value` is None if the call is unscored, and 0 if the comparison gives no signal; then `reason`
    says why. `comparison` is None if the call was not compared.
    """

    value: float | None
    reason: NoSignal | None
    comparison: AdvantageSteps | None = None

    @property
    def air_weight(self) -> float:
        """Return the weight of AIR; 1 if the call was not compared."""
        return 1.0 if self.comparison is None else self.comparison.air_weight


UNSCORED: Final = Advantage(value=None, reason=None)


class ScoredCalls(Record, frozen=True, kw_only=True):
    """A unit of comparison: the scored calls of an episode, or of one agent in it.

    `episode` is the episode's index in the update, `positions` are the calls' indices in the
    episode; `finals` and `airs` are in the order of `positions`. Units of the same group and agent
    are compared with each other.
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

    Advantages are ordered by episode, then by call. `before` are the moving baselines after the
    last update; they are returned unchanged if the recipe's baseline compares no episodes.
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
    # A reward outside the range widens it; otherwise all rewards above it would count as equal.
    baselines = _unit_baselines(units, rule, after, (min([low, *earned]), max([high, *earned])))
    scaled = _scaled_differences(units, baselines, rule, high - low)
    result = [[UNSCORED] * len(episode.returns) for episode in episodes]
    for unit, baseline, compared in zip(units, baselines, scaled, strict=True):
        # AIR may give a signal where equal final rewards give none.
        air_has_signal = baseline.air.reason is None and baseline.weight > 0.0
        reason = baseline.final.reason
        reason = None if air_has_signal and reason != "alone" else reason
        for position, steps in zip(unit.positions, compared, strict=True):
            result[unit.episode][position] = Advantage(
                value=steps.value if reason is None else 0.0, reason=reason, comparison=steps
            )
    return result, after.pruned()


class Baselines(Record, frozen=True, kw_only=True):
    """The baselines of a unit's final rewards and AIR.

    `weight` is `f` of the module's formula; `is_alike` is explained in `AdvantageSteps`.
    """

    final: BaselineValue
    air: BaselineValue
    weight: float
    is_alike: bool


def _scaled_differences(
    units: Sequence[ScoredCalls], baselines: Sequence[Baselines], rule: CreditOptions, width: float
) -> list[list[AdvantageSteps]]:
    """Return the steps to the advantage of each unit's calls, in the order of `units`.

    `baselines` are the units' baselines. `width` is the width of the reward range.
    """
    normalisation = NORMALISATIONS[rule.normalisation]
    pairs = list(zip(units, baselines, strict=True))
    finals = [[value - baseline.final.value for value in unit.finals] for unit, baseline in pairs]
    airs = [[value - baseline.air.value for value in unit.airs] for unit, baseline in pairs]
    by_baseline = normalisation.spread_over == "baseline"
    spreads = [baseline.final.spread if by_baseline else None for baseline in baselines]
    if normalisation.spread_over == "update":
        counts = [baseline.final.reason != "alone" for baseline in baselines]
        finals, airs = _subtract_mean(finals, counts), _subtract_mean(airs, counts)
        spreads = [spread_about(0.0, list(compress(finals, counts)))] * len(finals)
    return [
        [
            AdvantageSteps(
                baseline=baseline.final.value,
                final=final,
                divisor=_divisor(spread, width * SMALLEST_SPREAD),
                final_weight=baseline.weight if normalisation.is_focal else 1.0,
                air_baseline=baseline.air.value,
                air=air,
                air_divisor=_divisor(spread, width * AIR_SPREAD),
                air_weight=baseline.weight,
                is_alike=baseline.is_alike,
            )
            for final, air in zip(unit_finals, unit_airs, strict=True)
        ]
        for unit_finals, unit_airs, spread, baseline in zip(
            finals, airs, spreads, baselines, strict=True
        )
    ]


def _subtract_mean(differences: list[list[float]], counts: Sequence[bool]) -> list[list[float]]:
    """Subtract the mean difference of the units marked in `counts` from all units' differences."""
    means = [mean_of(unit) for unit in compress(differences, counts)]
    mean = mean_of(means) if means else 0.0
    return [[difference - mean for difference in unit] for unit in differences]


def _divisor(spread: float | None, least: float) -> float:
    return 1.0 if spread is None else max(spread, least)


def _scored_calls(index: int, episode: EpisodeReturns, rule: CreditOptions) -> list[ScoredCalls]:
    if episode.account.earlier and not rule.compares_episodes:
        # An episode of an earlier update is only needed for its group's baseline.
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
            positions=tuple(position for position, _, _ in calls),
            finals=tuple(final for _, final, _ in calls),
            airs=tuple(air for _, _, air in calls),
        )
        for agent, calls in scored.items()
    ]


def _unit_baselines(
    units: Sequence[ScoredCalls],
    rule: CreditOptions,
    moving: MovingBaselines,
    reward_range: RewardRange,
) -> list[Baselines]:
    """Return the baselines of each unit, in the order of `units`.

    If the recipe's baseline needs a group, a unit is compared with the other units of its group, or
    with its family's moving average if it is alone in its group or all units have the same final
    reward. If a task always fails, only the family's other tasks show how much better a policy can
    do.
    """
    baseline = BASELINES[rule.baseline]
    compared: dict[tuple[int, str], list[int]] = {}
    for index, unit in enumerate(units):
        compared.setdefault((unit.group, unit.agent), []).append(index)
    by_index: dict[int, Baselines] = {}
    for indices in compared.values():
        members = [units[index] for index in indices]
        is_alone = len(members) == 1
        is_alike = baseline.needs_group and len({f for unit in members for f in unit.finals}) == 1
        if is_alike or (baseline.needs_group and is_alone):
            family, agent = members[0].family, members[0].agent
            average = moving.final_average(family, agent)
            finals = [family_baseline(unit.finals, average) for unit in members]
            airs = [
                family_baseline(unit.airs, moving.air_average(family, agent)) for unit in members
            ]
            weight = air_weight([average.mean], reward_range)
        else:
            finals = baseline.values([unit.finals for unit in members])
            airs = baseline.values([unit.airs for unit in members])
            weight = air_weight([mean_of(unit.finals) for unit in members], reward_range)
        for index, final, air in zip(indices, finals, airs, strict=True):
            by_index[index] = Baselines(
                final=final, air=air, weight=weight, is_alike=is_alike and not is_alone
            )
    return [by_index[index] for index in range(len(units))]
