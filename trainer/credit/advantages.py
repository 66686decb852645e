"""Advantages: returns compared, normalised, and shared out among an episode's calls (pure).

    advantage of a call = share · (return − baseline) / divisor

`share` is the call's part of its episode's return (`returns`), `baseline` what the return is
compared with (`baselines`). The recipe's `normalisation` chooses the divisor:

- `group`: the spread of the returns that the baseline is taken over, as in GRPO
  (arXiv:2402.03300 §4.1.2); 1 where there is no baseline.
- `batch`: the spread over the update, after the update's mean is subtracted, as in
  REINFORCE++ (arXiv:2501.03262 §3).
- `none`: 1, as in Dr. GRPO (arXiv:2503.20783 §3.2).

A spread below the recipe's `smallest_spread` is replaced by it: differences that small carry
no signal and must not be amplified.
"""

from collections.abc import Sequence
from typing import Final

from store.records import Record
from trainer.credit.accounts import EpisodeAccount
from trainer.credit.baselines import (
    Baseline,
    NoSignal,
    group_baselines,
    leave_one_out_baselines,
    moving_baselines,
    spread_about,
    zero_baselines,
)
from trainer.credit.means import mean_of
from trainer.credit.moving import MovingBaselines, task_family
from trainer.credit.returns import CallReturn
from trainer.recipes.credit import CreditOptions


class EpisodeReturns(Record, frozen=True, kw_only=True):
    """An episode with the return of each of its calls, and the number of its group."""

    group: int
    account: EpisodeAccount
    returns: tuple[CallReturn, ...]


class Advantage(Record, frozen=True, kw_only=True):
    """A call's advantage.

    `value` is None if nobody scored the call, and 0 if the comparison gives no signal; `reason`
    says why it gives none.
    """

    value: float | None
    reason: NoSignal | None


UNSCORED: Final = Advantage(value=None, reason=None)


class ScoredCalls(Record, frozen=True, kw_only=True):
    """The scored calls that are compared as one: those of an episode, or of one of its agents.

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
    last update left; unless the recipe's `baseline` is `moving` they are returned unchanged.
    """
    units = [
        unit
        for index, episode in enumerate(episodes)
        for unit in _scored_calls(index, episode, rule)
    ]
    after = _updated_moving(units, rule, before)
    baselines = _baselines(units, rule, before, after)
    result = [[UNSCORED] * len(episode.returns) for episode in episodes]
    for unit, normalised in zip(units, _normalised(units, baselines, rule), strict=True):
        for position, (value, reason) in zip(unit.positions, normalised, strict=True):
            share = episodes[unit.episode].returns[position].share
            result[unit.episode][position] = Advantage(
                value=share * value if share and reason is None else 0.0, reason=reason
            )
    return result, after.pruned()


def _scored_calls(index: int, episode: EpisodeReturns, rule: CreditOptions) -> list[ScoredCalls]:
    if episode.account.earlier and rule.baseline in ("moving", "none"):
        # Only a group's own statistics have a use for an episode that is consumed already.
        return []
    by_agent = rule.assignment == "per_agent" or rule.baseline == "moving"
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
    units: Sequence[ScoredCalls], rule: CreditOptions, before: MovingBaselines
) -> MovingBaselines:
    if rule.baseline != "moving":
        return before
    returns: dict[tuple[str, str], list[float]] = {}
    for unit in units:
        returns.setdefault((unit.family, unit.agent), []).append(mean_of(unit.returns))
    return before.updated(returns, rule.baseline_rate)


def _baselines(
    units: Sequence[ScoredCalls],
    rule: CreditOptions,
    before: MovingBaselines,
    after: MovingBaselines,
) -> list[Baseline]:
    """Return the baseline of each unit, in the order of `units`."""
    compared: dict[tuple[object, str], list[int]] = {}
    for index, unit in enumerate(units):
        over = unit.family if rule.baseline == "moving" else unit.group
        compared.setdefault((over, unit.agent), []).append(index)
    by_index: dict[int, Baseline] = {}
    for indices in compared.values():
        first = units[indices[0]]
        returns = [units[index].returns for index in indices]
        match rule.baseline:
            case "group":
                baselines = group_baselines(returns)
            case "leave_one_out":
                baselines = leave_one_out_baselines(returns)
            case "moving":
                baselines = moving_baselines(returns, first.family, first.agent, before, after)
            case "none":
                baselines = zero_baselines(returns)
        by_index |= dict(zip(indices, baselines, strict=True))
    return [by_index[index] for index in range(len(units))]


Normalised = list[tuple[float, NoSignal | None]]


def _normalised(
    units: Sequence[ScoredCalls], baselines: Sequence[Baseline], rule: CreditOptions
) -> list[Normalised]:
    """Return each return's difference from its baseline, divided as the recipe says."""
    differences = [
        [value - baseline.value for value in unit.returns]
        for unit, baseline in zip(units, baselines, strict=True)
    ]
    if rule.normalisation == "batch":
        return _normalised_over_update(differences, baselines, rule.smallest_spread)
    divisors = [
        max(baseline.spread, rule.smallest_spread)
        if rule.normalisation == "group" and baseline.spread is not None
        else 1.0
        for baseline in baselines
    ]
    return [
        [(difference / divisor, baseline.reason) for difference in own]
        for own, divisor, baseline in zip(differences, divisors, baselines, strict=True)
    ]


def _normalised_over_update(
    differences: Sequence[Sequence[float]], baselines: Sequence[Baseline], smallest_spread: float
) -> list[Normalised]:
    compared = [
        own
        for own, baseline in zip(differences, baselines, strict=True)
        if baseline.reason != "alone"
    ]
    mean = mean_of([mean_of(own) for own in compared]) if compared else 0.0
    divisor = max(spread_about(mean, compared), smallest_spread)
    return [
        [((difference - mean) / divisor, baseline.reason) for difference in own]
        for own, baseline in zip(differences, baselines, strict=True)
    ]
