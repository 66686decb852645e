"""Leave out calls whose grammar the trainer cannot replay, with their reason (pure)."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from store.records import Episode, TransitionRow
from store.updates.claims import Claim
from store.values.grammars import GRAMMAR

# Why, by the id of each such call; an update's metrics have it if there are any.
UNREPLAYED: Final = "unreplayed_calls"


def calls_with_grammar(claim: Claim) -> list[TransitionRow]:
    """Return the calls of a claim that may be trained and that a grammar held."""
    return [
        call
        for group in claim.groups
        for episode in group.episodes
        for call in episode.calls
        if call.trainable and call.policy == claim.policy and GRAMMAR in call.sampling
    ]


def without_calls(claim: Claim, reasons: Mapping[str, str]) -> Claim:
    """Return the claim with some calls marked as not trainable; `reasons` are by call id."""
    if not reasons:
        return claim
    groups = tuple(
        msgspec.structs.replace(
            group, episodes=tuple(_of_episode(episode, reasons) for episode in group.episodes)
        )
        for group in claim.groups
    )
    return msgspec.structs.replace(claim, groups=groups)


def _of_episode(episode: Episode, reasons: Mapping[str, str]) -> Episode:
    calls = tuple(
        msgspec.structs.replace(call, trainable=False, reason=reasons[str(call.id)])
        if str(call.id) in reasons
        else call
        for call in episode.calls
    )
    return msgspec.structs.replace(episode, calls=calls)


def unreplayed_in(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the calls that an update recorded in its metrics, and why, by call id."""
    return dict(metrics.get(UNREPLAYED, {}))
