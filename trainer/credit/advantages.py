"""Compare returns, normalise the differences, and share them out among calls (pure).

    advantage of a call = share · ((final − baseline of finals) / max(s, smallest_spread)
                                   + (air − baseline of airs) / max(s, air_spread))

`share` is the call's part of its episode's return (`returns`). The recipe names the baseline
(`baselines`), which final rewards and AIR each have of their own, and the normalisation that gives
`s`, the spread of the *final* rewards (`normalisations`). AIR is not divided by its own spread:
among episodes that all fail that spread is small, and the division would undo the limit on AIR.

A recipe with `air_spread = None` is one from before there was that key: AIR is then a part of the
final reward, and `s` is the spread of their sum.
"""

from collections.abc import Sequence
from typing import Final

from store.records import Record
from store.values.families import task_family
from trainer.credit.accounts import EpisodeAccount
from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns, NoSignal
from trainer.credit.baselines.registry import baselines
from trainer.credit.means import mean_of
from trainer.credit.moving import MovingBaselines
from trainer.credit.normalisations.registry import normalisations
from trainer.credit.returns import CallReturn
from trainer.recipes.credit import CreditOptions


class EpisodeReturns(Record, frozen=True, kw_only=True):
    """Hold an episode with the return of each of its calls, and the number of its group."""

    group: int
    account: EpisodeAccount
    returns: tuple[CallReturn, ...]


class Advantage(Record, frozen=True, kw_only=True):
    """Hold a call's advantage.

    `value` is None if nobody scored the call, and 0 if the comparison gives no signal; `reason`
    says why it gives none.
    """

    value: float | None
    reason: NoSignal | None


UNSCORED: Final = Advantage(value=None, reason=None)


class ScoredCalls(Record, frozen=True, kw_only=True):
    """Hold the scored calls that are compared as one: an episode's, or those of one of its agents.

    `episode` is the episode's index in the update, `positions` are those of the calls in the
    episode, and `finals` and `airs` are the calls' returns, in the order of `positions`.
    """

    episode: int
    group: int
    family: str
    agent: str
    positions: tuple[int, ...]
    finals: tuple[float, ...]
    airs: tuple[float, ...]


class Against(Record, frozen=True, kw_only=True):
    """Hold what the final rewards and the AIR of an episode's calls are compared with."""

    final: BaselineValue
    air: BaselineValue

    @property
    def reason(self) -> NoSignal | None:
        """Return why neither comparison gives a signal, or None if one does."""
        if self.final.reason == "alone" or self.air.reason is not None:
            return self.final.reason
        return None


def advantages(
    episodes: Sequence[EpisodeReturns], rule: CreditOptions, before: MovingBaselines
) -> tuple[list[list[Advantage]], MovingBaselines]:
    """Return the advantages of an update's calls, and the moving baselines after the update.

    Advantages are ordered by episode, then by call. `before` are the moving baselines that the
    last update left; they are returned unchanged unless the recipe's baseline needs them.
    """
    baseline = baselines()[rule.baseline]
    units = [
        unit
        for index, episode in enumerate(episodes)
        for unit in _scored_calls(index, episode, rule, baseline)
    ]
    after = before
    if baseline.needs_moving_averages:
        after = _updated_moving(units, rule.baseline_rate, before)
    against = _compared(units, baseline, before, after)
    result = [[UNSCORED] * len(episode.returns) for episode in episodes]
    for unit, other, own in zip(units, against, _scaled(units, against, rule), strict=True):
        for position, value in zip(unit.positions, own, strict=True):
            share = episodes[unit.episode].returns[position].share
            result[unit.episode][position] = _advantage(share, value, other.reason)
    return result, after.pruned()


def _scaled(
    units: Sequence[ScoredCalls], against: Sequence[Against], rule: CreditOptions
) -> list[list[float]]:
    """Return the sum of both scaled differences of each call, in the order of `units`."""
    normalisation = normalisations()[rule.normalisation]
    values = [other.final for other in against]
    finals = normalisation.centred(
        [_minus(unit.finals, other.final) for unit, other in zip(units, against, strict=True)],
        values,
    )
    airs = normalisation.centred(
        [_minus(unit.airs, other.air) for unit, other in zip(units, against, strict=True)], values
    )
    spreads = normalisation.spreads(finals, values)
    return [
        [
            final / _divisor(spread, rule.smallest_spread) + air / _divisor(spread, rule.air_spread)
            for final, air in zip(own, own_airs, strict=True)
        ]
        for own, own_airs, spread in zip(finals, airs, spreads, strict=True)
    ]


def _minus(returns: Sequence[float], baseline: BaselineValue) -> list[float]:
    return [value - baseline.value for value in returns]


def _divisor(spread: float | None, least: float | None) -> float:
    """Return what to divide by; there is nothing to divide if `least` is None (no AIR apart)."""
    return 1.0 if spread is None or least is None else max(spread, least)


def _advantage(share: float, value: float, reason: NoSignal | None) -> Advantage:
    return Advantage(value=share * value if share and reason is None else 0.0, reason=reason)


def _scored_calls(
    index: int, episode: EpisodeReturns, rule: CreditOptions, baseline: Baseline
) -> list[ScoredCalls]:
    if episode.account.earlier and not baseline.needs_group:
        # Only a group's own statistics have a use for an episode that is consumed already.
        return []
    by_agent = rule.assignment == "per_agent" or baseline.needs_moving_averages
    scored: dict[str, list[tuple[int, float, float]]] = {}
    for position, call in enumerate(episode.returns):
        if call.final is not None:
            agent = episode.account.calls[position].agent if by_agent else ""
            parts = _parts(call.final, call.air, rule)
            scored.setdefault(agent, []).append((position, *parts))
    return [
        ScoredCalls(
            episode=index,
            group=episode.group,
            family=task_family(episode.account.task),
            agent=agent,
            positions=tuple(position for position, _, _ in own),
            finals=tuple(final for _, final, _ in own),
            airs=tuple(air for _, _, air in own),
        )
        for agent, own in scored.items()
    ]


def _parts(final: float, air: float, rule: CreditOptions) -> tuple[float, float]:
    """Return the final reward and AIR as they are compared: without `air_spread` as one."""
    return (final + air, 0.0) if rule.air_spread is None else (final, air)


def _updated_moving(
    units: Sequence[ScoredCalls], rate: float, before: MovingBaselines
) -> MovingBaselines:
    finals: dict[tuple[str, str], list[float]] = {}
    airs: dict[tuple[str, str], list[float]] = {}
    for unit in units:
        finals.setdefault((unit.family, unit.agent), []).append(mean_of(unit.finals))
        airs.setdefault((unit.family, unit.agent), []).append(mean_of(unit.airs))
    after = before.updated(finals, rate)
    return MovingBaselines(
        families=after.families, airs=before.of_airs().updated(airs, rate).families
    )


def _compared(
    units: Sequence[ScoredCalls],
    baseline: Baseline,
    before: MovingBaselines,
    after: MovingBaselines,
) -> list[Against]:
    """Return what each unit is compared with, in the order of `units`."""
    compared: dict[tuple[object, str], list[int]] = {}
    for index, unit in enumerate(units):
        over = unit.family if baseline.needs_moving_averages else unit.group
        compared.setdefault((over, unit.agent), []).append(index)
    by_index: dict[int, Against] = {}
    for indices in compared.values():
        own = [units[index] for index in indices]
        finals = baseline.values(_returns([unit.finals for unit in own], own[0], before, after))
        airs = baseline.values(
            _returns([unit.airs for unit in own], own[0], before.of_airs(), after.of_airs())
        )
        by_index |= {
            index: Against(final=final, air=air)
            for index, final, air in zip(indices, finals, airs, strict=True)
        }
    return [by_index[index] for index in range(len(units))]


def _returns(
    returns: Sequence[tuple[float, ...]],
    first: ScoredCalls,
    before: MovingBaselines,
    after: MovingBaselines,
) -> ComparedReturns:
    return ComparedReturns(
        returns=tuple(returns), family=first.family, agent=first.agent, before=before, after=after
    )
