"""AIR: automatic intermediate rewards from how an episode's tools ended (pure).

Agent Lightning (arXiv:2508.03680 §3.2.2) describes rewards from monitored system events;
here r_air = λ · clip(mean score of the episode's tool events, −1, 1), the same for each of
the episode's calls, with λ ≤ 0.2 so that no heap of easy tool calls outweighs the task.
"""

from collections.abc import Iterable, Mapping

from store.records import Episode, ToolEvent


def standing_events(episode: Episode) -> list[ToolEvent]:
    """The events that count: each answers to a call of the episode."""
    return [event for call in episode.calls for event in call.tool_events]


def air_reward(
    events: Iterable[ToolEvent], scores: Mapping[str, float], air_lambda: float
) -> float:
    """r_air of an episode; 0 where it ran no tool."""
    values = [scores[event.status] for event in events]
    if not values:
        return 0.0
    return air_lambda * max(-1.0, min(1.0, sum(values) / len(values)))
