"""Compute AIR: automatic intermediate rewards from how tool executions ended (pure).

Agent Lightning (arXiv:2508.03680 §3.4.2) proposes rewards from monitored system signals such
as the return status of a tool, and gives no formula. Pawl's is

    r_air = λ · clip(mean score of the episode's tool events, −1, 1)

for each of the episode's calls. λ is at most 0.2, so that many easy tool calls do not
outweigh the task. An event whose score is 0 is left out of the mean: the `error` of a tool that
ran, such as a red test, is information and neither lowers nor raises the reward.

Compared returns count AIR by `air_weight`, which falls to 0 as episodes succeed: a policy that
solves the task learns from its final rewards alone.

Three rules guard against reward hacking. An event counts only if a call of the episode
requested that tool, or is itself what was executed. The same tool with the same arguments counts
once, with the worst of its outcomes, so that repeating a call can only lower the reward. The recipe
refuses scores under which a malformed call is not worse than every clean failure.
"""

import json
from collections.abc import Iterable, Sequence

from store.read.facts import MatchedEvent
from trainer.credit.means import mean_of
from trainer.recipes.recipe import CreditOptions


def air_reward(events: Iterable[MatchedEvent], rule: CreditOptions) -> float:
    """Return r_air from the tool events of an episode's calls; 0 if none has a score."""
    worst: dict[object, float] = {}
    for index, event in enumerate(events):
        key = _execution_key(event) or index
        score = rule.air_scores[event.status]
        worst[key] = min(score, worst.get(key, score))
    scores = [score for score in worst.values() if score != 0.0]
    if not scores:
        return 0.0
    return rule.air_lambda * max(-1.0, min(1.0, mean_of(scores)))


def air_weight(finals: Sequence[float]) -> float:
    """Return AIR's weight, 1 to 0, among episodes with these final rewards, one or more.

    It is 1 minus their success rate: the mean of the final rewards, each clipped to 0 to 1.
    """
    return 1.0 - mean_of([max(0.0, min(1.0, final)) for final in finals])


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
