"""Compare returns, normalise the differences, and share them out among calls (pure).

    advantage of a call = share · (return − baseline) / divisor

`share` is the call's part of its episode's return (`returns`). The recipe names the baseline
(`baselines`), and the normalisation that gives the divisor (`normalisations`).
"""

from collections.abc import Sequence
from typing import Final

from store.records import Record
from trainer.credit.accounts import EpisodeAccount
from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns, NoSignal
from trainer.credit.baselines.registry import baselines
from trainer.credit.means import mean_of
from trainer.credit.moving import MovingBaselines, task_family
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
    episode, and `returns` are the calls' returns, in the order of `positions`.
    """

    episode: int
    group: int
    family: str
    agent: str
    positions: tuple[int, ...]
    returns: tuple[float, ...]


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
    values = _baseline_values(units, baseline, before, after)
    normalised = normalisations()[rule.normalisation].normalised(
        [
            [value - against.value for value in unit.returns]
            for unit, against in zip(units, values, strict=True)
        ],
        values,
        rule.smallest_spread,
    )
    result = [[UNSCORED] * len(episode.returns) for episode in episodes]
    for unit, against, own in zip(units, values, normalised, strict=True):
        for position, value in zip(unit.positions, own, strict=True):
            share = episodes[unit.episode].returns[position].share
            result[unit.episode][position] = _advantage(share, value, against.reason)
    return result, after.pruned()


def _advantage(share: float, value: float, reason: NoSignal | None) -> Advantage:
    return Advantage(value=share * value if share and reason is None else 0.0, reason=reason)


def _scored_calls(
    index: int, episode: EpisodeReturns, rule: CreditOptions, baseline: Baseline
) -> list[ScoredCalls]:
    if episode.account.earlier and not baseline.needs_group:
        # Only a group's own statistics have a use for an episode that is consumed already.
        return []
    by_agent = rule.assignment == "per_agent" or baseline.needs_moving_averages
    scored: dict[str, list[tuple[int, float]]] = {}
    for position, call in enumerate(episode.returns):
        if call.value is not None:
            agent = episode.account.calls[position].agent if by_agent else ""
            scored.setdefault(agent, []).append((position, call.value))
    return [
        ScoredCalls(
            episode=index,
            group=episode.group,
            family=task_family(episode.account.task),
            agent=agent,
            positions=tuple(position for position, _ in own),
            returns=tuple(value for _, value in own),
        )
        for agent, own in scored.items()
    ]


def _updated_moving(
    units: Sequence[ScoredCalls], rate: float, before: MovingBaselines
) -> MovingBaselines:
    returns: dict[tuple[str, str], list[float]] = {}
    for unit in units:
        returns.setdefault((unit.family, unit.agent), []).append(mean_of(unit.returns))
    return before.updated(returns, rate)


def _baseline_values(
    units: Sequence[ScoredCalls],
    baseline: Baseline,
    before: MovingBaselines,
    after: MovingBaselines,
) -> list[BaselineValue]:
    """Return what each unit is compared with, in the order of `units`."""
    compared: dict[tuple[object, str], list[int]] = {}
    for index, unit in enumerate(units):
        over = unit.family if baseline.needs_moving_averages else unit.group
        compared.setdefault((over, unit.agent), []).append(index)
    by_index: dict[int, BaselineValue] = {}
    for indices in compared.values():
        first = units[indices[0]]
        values = baseline.values(
            ComparedReturns(
                returns=tuple(units[index].returns for index in indices),
                family=first.family,
                agent=first.agent,
                before=before,
                after=after,
            )
        )
        by_index |= dict(zip(indices, values, strict=True))
    return [by_index[index] for index in range(len(units))]
