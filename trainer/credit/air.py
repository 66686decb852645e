"""Compute AIR: automatic intermediate rewards from how tool executions ended (pure).

Agent Lightning (arXiv:2508.03680 §3.4.2) proposes rewards from monitored system signals such
as the return status of a tool, and gives no formula. Pawl's is

    r_air = λ · width · clip(mean of (score − usual score of the tool) over the tool events, −1, 1)

for each of the episode's calls. `width` is the width of the reward range, which puts AIR on the
scale of the rewards; λ is at most 0.2, so that many easy tool calls do not outweigh the task. The
usual score of a tool is its mean score in the claim: a tool that always works earns nothing,
however often it is called. An event with the score 0 is left out. By default that is the `error` of
a tool that ran, such as a failing test: it informs the agent, and neither lowers nor raises the
reward.

Comparisons multiply AIR by `air_weight`, which falls to 0 as more episodes succeed: a policy that
solves the task learns from its final rewards alone.

Three rules guard against reward hacking. An event counts only if a call of the episode
requested that tool, or if the executed code is the text of the call's reply. The same tool with
the same arguments counts once, with its worst outcome, so that repetition only lowers the reward.
The recipe must give a malformed call a lower score than every other failure.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from store.read.facts import MatchedEvent
from store.records import Record
from trainer.credit.means import mean_of
from trainer.recipes.recipe import CreditOptions

RewardRange = tuple[float, float]


class ScoredEvent(Record, frozen=True):
    """The score of one tool execution; `ran` is False for a malformed call."""

    tool: str | None
    score: float
    ran: bool


class UsualScores(Record, frozen=True, kw_only=True):
    """Mean scores in a claim: of each tool, and of all tool events (`overall`)."""

    tools: Mapping[str | None, float] = {}
    overall: float = 0.0

    def tool_score(self, tool: str | None) -> float:
        """Return a tool's mean score, or the overall mean for a tool that never ran."""
        return self.tools.get(tool, self.overall)


NO_USUAL_SCORES: Final = UsualScores()


def scored_events(events: Iterable[MatchedEvent], rule: CreditOptions) -> list[ScoredEvent]:
    """Return the events with a nonzero score; repeats count once, with the worst score."""
    worst: dict[object, ScoredEvent] = {}
    for index, event in enumerate(events):
        key = _execution_key(event) or index
        score = rule.air_scores[event.status]
        if key not in worst or score < worst[key].score:
            worst[key] = ScoredEvent(event.tool, score, event.status != "malformed")
    return [event for event in worst.values() if event.score != 0.0]


def usual_scores(events: Iterable[ScoredEvent]) -> UsualScores:
    """Return the mean scores over a claim's events.

    A tool that never ran gets no mean of its own. Otherwise a call of a tool that does not exist
    would never differ from its usual score, and cost nothing.
    """
    by_tool: dict[str | None, list[ScoredEvent]] = {}
    for event in events:
        by_tool.setdefault(event.tool, []).append(event)
    if not by_tool:
        return NO_USUAL_SCORES
    return UsualScores(
        tools={
            tool: mean_of([event.score for event in own])
            for tool, own in by_tool.items()
            if any(event.ran for event in own)
        },
        overall=mean_of([event.score for own in by_tool.values() for event in own]),
    )


def air_reward(events: Sequence[ScoredEvent], usual: UsualScores, limit: float) -> float:
    """Return the r_air of these tool events, between −`limit` and `limit`; 0 without events."""
    if not events:
        return 0.0
    differences = [event.score - usual.tool_score(event.tool) for event in events]
    return limit * max(-1.0, min(1.0, mean_of(differences)))


def air_weight(finals: Sequence[float], reward_range: RewardRange) -> float:
    """Return the weight of AIR, 0 to 1, in a comparison of episodes with these final rewards.

    It is 1 minus the success rate: the rewards' mean, with the reward range mapped to 0 to 1. There
    must be one reward or more.
    """
    low, high = reward_range
    return 1.0 - mean_of([max(0.0, min(1.0, (final - low) / (high - low))) for final in finals])


def _execution_key(event: MatchedEvent) -> tuple[str | None, ...] | None:
    """Return a key shared by repeats of one execution, or None if nothing identifies it."""
    if event.arguments is not None:
        return (event.tool, "arguments", canonical_arguments(event.arguments))
    return None if event.id is None else (event.tool, "id", event.id)


def canonical_arguments(arguments: str) -> str:
    """Return tool arguments as canonical JSON: sorted keys, no spaces between items, 2.0 as 2.

    Arguments that are not JSON, such as those of a malformed call, are returned without blanks at
    both ends.
    """
    try:
        return json.dumps(
            _normalise_numbers(json.loads(arguments)), sort_keys=True, separators=(",", ":")
        )
    except (ValueError, RecursionError):
        return arguments.strip()


def _normalise_numbers(value: object) -> object:
    """Replace whole floats by integers: JSON has one kind of number, and 2.0 is 2."""
    if isinstance(value, dict):
        return {key: _normalise_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_normalise_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
