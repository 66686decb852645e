"""Compute AIR: automatic intermediate rewards from how tool executions ended (pure).

Agent Lightning (arXiv:2508.03680 §3.4.2) proposes rewards from monitored system signals such
as the return status of a tool, and gives no formula. Pawl's is

    r_air = λ · clip(mean score of the episode's tool events, −1, 1)

for each of the episode's calls. λ is at most 0.2, so that many easy tool calls do not
outweigh the task.

Three rules guard against reward hacking. An event counts only if a call of the episode
requested that tool, or is itself what was executed. The same tool with the same arguments counts
once, with the worst of its outcomes, so that repeating a call can only lower the reward. The recipe
refuses scores under which a malformed call is not worse than every clean failure.
"""

import json
from collections.abc import Sequence
from typing import Final

from store.read.facts import MatchedEvent
from trainer.credit.means import mean_of
from trainer.recipes.credit import CreditOptions

STEP_WARNING: Final = (
    'air_assignment = "step" rewards each call for its own tools, whatever the task came to:'
    " calls that need no tool earn less than easy ones that do. Watch the final reward, and set"
    ' air_assignment = "episode" if it falls.'
)


def air_rewards(calls: Sequence[Sequence[MatchedEvent]], rule: CreditOptions) -> list[float]:
    """Return r_air of each of an episode's calls, from each call's events; 0 if there are none."""
    scores = counted_scores(calls, rule)
    if rule.air_assignment == "step":
        return [_air_reward(own, rule.air_lambda) for own in scores]
    whole = _air_reward([score for own in scores for score in own], rule.air_lambda)
    return [whole] * len(calls)


def counted_scores(
    calls: Sequence[Sequence[MatchedEvent]], rule: CreditOptions
) -> list[list[float]]:
    """Return the scores that count, by call.

    Of several outcomes of the same tool with the same arguments the worst counts, and of
    equally bad ones the earliest, which belongs to the earliest call.
    """
    counted: dict[object, tuple[float, int]] = {}
    for position, events in enumerate(calls):
        for index, event in enumerate(events):
            score = _score(event, rule)
            key = _execution_key(event) or (position, index)
            if key not in counted or score < counted[key][0]:
                counted[key] = (score, position)
    by_call: list[list[float]] = [[] for _ in calls]
    for score, position in counted.values():
        by_call[position].append(score)
    return by_call


def _score(event: MatchedEvent, rule: CreditOptions) -> float:
    own = rule.air_tools.get(event.tool or "", {})
    return own.get(event.status, rule.air_scores[event.status])


def _execution_key(event: MatchedEvent) -> tuple[str | None, ...] | None:
    """Return a key shared by repeats of one execution, or None if nothing identifies it."""
    if event.arguments is not None:
        return (event.tool, "arguments", canonical(event.arguments))
    return None if event.id is None else (event.tool, "id", event.id)


def canonical(arguments: str) -> str:
    """Return tool arguments in one canonical form: sorted keys, no blanks, 2.0 as 2.

    Arguments that are not JSON, such as those of a malformed call, are only stripped.
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


def _air_reward(scores: Sequence[float], air_lambda: float) -> float:
    if not scores:
        return 0.0
    return air_lambda * max(-1.0, min(1.0, mean_of(scores)))
