"""Find the calls that a learner without ratios can train on, and the others cannot (pure).

Their ids are exact, and what they were sampled from cannot be computed again: nothing was sampled
(`greedy`), or a grammar that the request does not tell held them (`constrained_sampling`). A
learner that imitates them needs neither. A `reshaped_distribution` stays out: settings such as a
budget for thinking write tokens that neither the policy chose nor the agent asked for.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from store.records import Episode, TransitionRow
from store.updates.claims import Claim

IMITABLE: Final = frozenset({"greedy", "constrained_sampling"})


def with_imitable(claim: Claim) -> Claim:
    """Return the claim with its policy's imitable calls marked as trainable."""
    groups = tuple(
        msgspec.structs.replace(group, episodes=_marked(group.episodes, claim.policy))
        for group in claim.groups
    )
    return msgspec.structs.replace(claim, groups=groups)


def _marked(episodes: Sequence[Episode], policy: str) -> tuple[Episode, ...]:
    return tuple(
        msgspec.structs.replace(
            episode,
            calls=tuple(
                msgspec.structs.replace(call, trainable=True, reason=None)
                if _is_imitable(call, policy)
                else call
                for call in episode.calls
            ),
        )
        for episode in episodes
    )


def _is_imitable(call: TransitionRow, policy: str) -> bool:
    # An outside model's, and a fixed policy's, have no version.
    is_own = call.policy == policy and call.policy_version is not None
    has_ids = bool(call.tokens.prompt_ids and call.tokens.sampled_ids)
    return call.reason in IMITABLE and is_own and has_ids
