"""AIR: automatic intermediate rewards from how an episode's tools ended (pure).

Agent Lightning (arXiv:2508.03680 §3.2.2) describes rewards from monitored system events;
here r_air = λ · clip(mean score of the episode's tool events, −1, 1), the same for each of
the episode's calls, with λ ≤ 0.2 so that no heap of easy tool calls outweighs the task.

Against reward hacking: an event counts only where a call of the episode asked for the tool;
the same tool with the same arguments counts once, as the worst of its endings, so that
repeating a call can only cost; and the recipe refuses scores by which a malformed call
would not be worse than every clean failure.
"""

import json
from collections.abc import Sequence
from typing import Final

from store.records import Record, ToolCall, ToolEvent, ToolStatus, TransitionRow
from trainer.means import mean_of
from trainer.recipe_parts import CreditPart

STEP_WARNING: Final = (
    'air_assignment = "step" pays each call for its own tools, whatever became of the task:'
    " calls that need no tool earn less than easy ones that do. Watch the final reward."
)


class AskedEvent(Record, frozen=True, kw_only=True):
    """How a tool ended that a call asked for; `arguments` are None where they are not known."""

    id: str | None
    tool: str | None
    arguments: str | None
    status: ToolStatus


def asked_events(call: TransitionRow) -> tuple[AskedEvent, ...]:
    """A call's events as far as it asked for the tools that they are about."""
    found = [asked_event(event, call.tool_calls) for event in call.tool_events]
    return tuple(event for event in found if event is not None)


def asked_event(event: ToolEvent, tool_calls: Sequence[ToolCall]) -> AskedEvent | None:
    """An event of a call with these tool calls; None where it asked for no such tool.

    A reply that the server's parser could not read as a call has no tool call: an event
    without an id that says `malformed` of it is about the reply itself, and counts.
    """
    asked = asked_for(event, tool_calls)
    if asked is not None:
        return AskedEvent(
            id=asked.id,
            tool=event.name or asked.name,
            arguments=asked.arguments,
            status=event.status,
        )
    if event.tool_id is None and event.status == "malformed":
        return AskedEvent(id=None, tool=event.name, arguments=None, status=event.status)
    return None


def asked_for(event: ToolEvent, tool_calls: Sequence[ToolCall]) -> ToolCall | None:
    """The tool call that an event is about: by its id, or the only one it can mean."""
    if event.tool_id is not None:
        return next((asked for asked in tool_calls if asked.id == event.tool_id), None)
    meant = [asked for asked in tool_calls if event.name in (None, asked.name)]
    return meant[0] if len(meant) == 1 else None


def air_rewards(calls: Sequence[Sequence[AskedEvent]], rule: CreditPart) -> list[float]:
    """r_air of each of an episode's calls, from the events that each asked for; 0 without any."""
    scores = standing_scores(calls, rule)
    if rule.air_assignment == "step":
        return [_reward(own, rule.air_lambda) for own in scores]
    whole = _reward([score for own in scores for score in own], rule.air_lambda)
    return [whole] * len(calls)


def standing_scores(calls: Sequence[Sequence[AskedEvent]], rule: CreditPart) -> list[list[float]]:
    """The scores that count, by the call that asked.

    Of several endings of the same tool with the same arguments the worst stands, and of equal
    ones the earliest call's.
    """
    standing: dict[object, tuple[float, int]] = {}
    for position, events in enumerate(calls):
        for place, event in enumerate(events):
            score = _score(event, rule)
            key = _same(event) or (position, place)
            if key not in standing or score < standing[key][0]:
                standing[key] = (score, position)
    found: list[list[float]] = [[] for _ in calls]
    for score, position in standing.values():
        found[position].append(score)
    return found


def _score(event: AskedEvent, rule: CreditPart) -> float:
    own = rule.air_tools.get(event.tool or "", {})
    return own.get(event.status, rule.air_scores[event.status])


def _same(event: AskedEvent) -> tuple[str | None, ...] | None:
    """What makes two executions the same; None where nothing is known of this one."""
    if event.arguments is not None:
        return (event.tool, "arguments", canonical(event.arguments))
    return None if event.id is None else (event.tool, "id", event.id)


def canonical(arguments: str) -> str:
    """Arguments that mean the same written in one way: keys in order, no blanks.

    What is not JSON, as the arguments of a malformed call, stands as it is.
    """
    try:
        return json.dumps(_plain(json.loads(arguments)), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments.strip()


def _plain(value: object) -> object:
    """JSON has one kind of number: 2.0 is 2."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _reward(scores: Sequence[float], air_lambda: float) -> float:
    if not scores:
        return 0.0
    return air_lambda * max(-1.0, min(1.0, mean_of(scores)))
