"""From returns to advantages: compared, divided, and shared out among an episode's calls (pure).

`normalisation` says what a difference from the baseline is divided by: `group`, the spread of
what the baseline is taken over (nothing where there is no baseline); `batch`, as REINFORCE++
does (arXiv:2501.03262 §3): the mean over the update's episodes is taken off, and their spread
divides; `none`, as in Dr. GRPO (arXiv:2503.20783 §3.2). No spread below `smallest_spread`
divides: differences that small are no signal to be blown up.
"""

from collections.abc import Sequence
from typing import Final

from store.records import Record
from trainer.credit.accounts import EpisodeAccount
from trainer.credit.baselines import (
    NoSignal,
    Standing,
    group_standings,
    leave_one_out_standings,
    moving_standings,
    no_standings,
    spread_about,
)
from trainer.credit.moving import Baselines, task_family
from trainer.credit.returns import CallReturn
from trainer.means import mean_of
from trainer.recipe_parts import CreditPart


class Paid(Record, frozen=True, kw_only=True):
    """An episode with what its calls are paid, and the number of its group."""

    group: int
    account: EpisodeAccount
    returns: tuple[CallReturn, ...]


class Advantage(Record, frozen=True, kw_only=True):
    """A call's advantage: None where nobody scored it, 0 where the comparison tells nothing.

    `reason` says why it tells nothing.
    """

    value: float | None
    reason: NoSignal | None


NOBODY_SCORED: Final = Advantage(value=None, reason=None)


class Member(Record, frozen=True, kw_only=True):
    """What is compared: an episode's scored calls, or those of one of its agents.

    `episode` is its place in the update, `places` the calls' in the episode.
    """

    episode: int
    group: int
    family: str
    agent: str
    places: tuple[int, ...]
    values: tuple[float, ...]


def advantages(
    paid: Sequence[Paid], rule: CreditPart, before: Baselines
) -> tuple[list[list[Advantage]], Baselines]:
    """The advantages of an update's calls, in their order, and the baselines after it."""
    members = [one for index, each in enumerate(paid) for one in _members(index, each, rule)]
    after = _advanced(members, rule, before)
    standings = _standings(members, rule, before, after)
    found = [[NOBODY_SCORED] * len(each.returns) for each in paid]
    for member, scaled in zip(members, _scaled(members, standings, rule), strict=True):
        for place, (value, reason) in zip(member.places, scaled, strict=True):
            share = paid[member.episode].returns[place].share
            found[member.episode][place] = Advantage(
                value=share * value if share and reason is None else 0.0, reason=reason
            )
    return found, after.kept()


def _members(index: int, paid: Paid, rule: CreditPart) -> list[Member]:
    if paid.account.earlier and rule.baseline in ("moving", "none"):
        return []
    by_agent = rule.assignment == "per_agent" or rule.baseline == "moving"
    scored: dict[str, list[tuple[int, float]]] = {}
    for place, one in enumerate(paid.returns):
        if one.value is not None:
            agent = paid.account.calls[place].agent if by_agent else ""
            scored.setdefault(agent, []).append((place, one.value))
    return [
        Member(
            episode=index,
            group=paid.group,
            family=task_family(paid.account.task),
            agent=agent,
            places=tuple(place for place, _ in own),
            values=tuple(value for _, value in own),
        )
        for agent, own in scored.items()
    ]


def _advanced(members: Sequence[Member], rule: CreditPart, before: Baselines) -> Baselines:
    if rule.baseline != "moving":
        return before
    returns: dict[tuple[str, str], list[float]] = {}
    for member in members:
        returns.setdefault((member.family, member.agent), []).append(mean_of(member.values))
    return before.advanced(returns, rule.baseline_rate)


def _standings(
    members: Sequence[Member], rule: CreditPart, before: Baselines, after: Baselines
) -> list[Standing]:
    """What each member is compared with, in their order."""
    compared: dict[tuple[object, str], list[int]] = {}
    for index, member in enumerate(members):
        over = member.family if rule.baseline == "moving" else member.group
        compared.setdefault((over, member.agent), []).append(index)
    found: dict[int, Standing] = {}
    for indices in compared.values():
        first = members[indices[0]]
        values = [members[index].values for index in indices]
        match rule.baseline:
            case "group":
                standings = group_standings(values)
            case "leave_one_out":
                standings = leave_one_out_standings(values)
            case "moving":
                standings = moving_standings(values, first.family, first.agent, before, after)
            case "none":
                standings = no_standings(values)
        found |= dict(zip(indices, standings, strict=True))
    return [found[index] for index in range(len(members))]


Scaled = list[tuple[float, NoSignal | None]]


def _scaled(
    members: Sequence[Member], standings: Sequence[Standing], rule: CreditPart
) -> list[Scaled]:
    """Each value's distance from its baseline, divided as the rule says."""
    far = [
        [value - standing.baseline for value in member.values]
        for member, standing in zip(members, standings, strict=True)
    ]
    if rule.normalisation == "batch":
        return _over_the_update(far, standings, rule.smallest_spread)
    divisors = [
        max(standing.spread, rule.smallest_spread)
        if rule.normalisation == "group" and standing.spread is not None
        else 1.0
        for standing in standings
    ]
    return [
        [(distance / divisor, standing.reason) for distance in own]
        for own, divisor, standing in zip(far, divisors, standings, strict=True)
    ]


def _over_the_update(
    far: Sequence[Sequence[float]], standings: Sequence[Standing], smallest: float
) -> list[Scaled]:
    compared = [
        own for own, standing in zip(far, standings, strict=True) if standing.reason != "alone"
    ]
    mean = mean_of([mean_of(own) for own in compared]) if compared else 0.0
    divisor = max(spread_about(mean, compared), smallest)
    return [
        [((distance - mean) / divisor, standing.reason) for distance in own]
        for own, standing in zip(far, standings, strict=True)
    ]
