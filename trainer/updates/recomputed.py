"""Find calls with exact ids whose log-probabilities the server did not give (pure).

The version that sampled them is immutable, so it gives the same ones again. Such rows are
`recomputed`: by this version, as the update begins. Where a version is lost, its calls are not
trained.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from store.records import Episode, Group, TransitionRow
from store.updates.claims import Claim
from trainer.batches.rows import Row, RowKey

# Reasons why a call is not trained: its version's files, or the model that they belong to.
VERSION_GONE: Final = "version_gone"
OTHER_BASE: Final = "other_base"


def versions_to_ask(claim: Claim) -> set[int]:
    """Return the versions that sampled the calls of a claim which have no log-probabilities."""
    return {
        call.policy_version or 0
        for group in claim.groups
        for episode in group.episodes
        for call in episode.calls
        if _lacks_logprobs(call, claim.policy)
    }


def without_versions(claim: Claim, lost: Mapping[int, str]) -> Claim:
    """Return the claim with the calls that wait for a `lost` version marked as not trainable.

    `lost` holds the reason by version.
    """
    if not lost:
        return claim
    groups = tuple(_of_group(group, claim.policy, lost) for group in claim.groups)
    return msgspec.structs.replace(claim, groups=groups)


def _of_group(group: Group, policy: str, lost: Mapping[int, str]) -> Group:
    episodes = tuple(_of_episode(episode, policy, lost) for episode in group.episodes)
    return msgspec.structs.replace(group, episodes=episodes)


def _of_episode(episode: Episode, policy: str, lost: Mapping[int, str]) -> Episode:
    calls = tuple(
        msgspec.structs.replace(call, trainable=False, reason=lost[call.policy_version or 0])
        if _lacks_logprobs(call, policy) and (call.policy_version or 0) in lost
        else call
        for call in episode.calls
    )
    return msgspec.structs.replace(episode, calls=calls)


def _lacks_logprobs(call: TransitionRow, policy: str) -> bool:
    return call.trainable and call.policy == policy and not call.tokens.sampled_logprobs


def rows_to_compute(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows that have no log-probabilities, by the version that sampled them.

    The newest comes first: it is mostly the one that the learner holds.
    """
    waiting = [row for row in rows if not row.sampled_logprobs]
    versions = sorted({row.version for row in waiting}, reverse=True)
    return {version: [row for row in waiting if row.version == version] for version in versions}


def with_logprobs(rows: Sequence[Row], values: Mapping[RowKey, Sequence[float]]) -> list[Row]:
    """Return the rows, those in `values` with these log-probabilities."""
    return [
        msgspec.structs.replace(row, sampled_logprobs=tuple(values[row.key]))
        if row.key in values
        else row
        for row in rows
    ]
