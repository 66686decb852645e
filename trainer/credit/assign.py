"""All of it, for the trainer: from groups of episodes to what each transition is worth (pure)."""

from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from store.records import Episode, Group, Record, TransitionRow
from trainer.credit.accounts import EpisodeAccount, account_of
from trainer.credit.calls import CallCredit, credit_accounts
from trainer.credit.moving import NO_BASELINES, Baselines
from trainer.credit.returns import EpisodeReturn
from trainer.recipe_parts import CreditPart


class TransitionCredit(CallCredit, frozen=True, kw_only=True):
    """The same with the call that was recorded; `position` is its place in its episode."""

    episode_id: UUID
    episode: str
    call: TransitionRow
    position: int


class Credited(Record, frozen=True, kw_only=True):
    """An update's credit: by transition, the return of each episode, and the next baselines."""

    transitions: tuple[TransitionCredit, ...]
    returns: Mapping[UUID, EpisodeReturn]
    baselines: Baselines


def assign_credit(
    groups: Sequence[Group],
    rule: CreditPart,
    *,
    policy: str,
    oldest_version: int,
    baselines: Baselines = NO_BASELINES,
) -> Credited:
    """The credit of every transition of an update, in the order of groups and calls.

    Calls of another policy than `policy` are not trainable. A group's `earlier` episodes count
    in what its others are compared with, and get none. One without a task is compared with no
    other. One with a call from before `oldest_version` is stale: it counts in what others are
    compared with, and is not trained. `baselines` are those that the update before left (of
    effect for the moving one alone).
    """
    members = [one for group in groups for one in _members(group, policy, oldest_version)]
    accounts = [[account for _, account in them] for them in members]
    found = credit_accounts(accounts, rule, baselines)
    flat = [pair for them in members for pair in them]
    kept = [
        (episode, credit, earned)
        for (episode, account), credit, earned in zip(flat, found.calls, found.returns, strict=True)
        if not account.earlier
    ]
    return Credited(
        transitions=tuple(
            _transition(episode, position, credit)
            for episode, own, _ in kept
            for position, credit in enumerate(own)
        ),
        returns={episode.id: earned for episode, _, earned in kept},
        baselines=found.baselines,
    )


Members = list[tuple[Episode, EpisodeAccount]]


def _members(group: Group, policy: str, oldest_version: int) -> list[Members]:
    """Those of a group that are compared with each other."""
    members = [
        (one, account_of(one, withheld=_stale(one, oldest_version)))
        for one in (_for_policy(episode, policy) for episode in group.episodes)
    ]
    if not group.task:
        return [[member] for member in members]
    return [members + [(one, account_of(one, earlier=True)) for one in group.earlier]]


def _for_policy(episode: Episode, policy: str) -> Episode:
    """The episode with what another policy sampled as not trainable: only its own counts."""
    calls = tuple(
        msgspec.structs.replace(call, trainable=False, reason="other_policy")
        if call.trainable and call.policy != policy
        else call
        for call in episode.calls
    )
    return msgspec.structs.replace(episode, calls=calls)


def _stale(episode: Episode, oldest_version: int) -> str | None:
    versions = [call.policy_version or 0 for call in episode.calls if call.trainable]
    return "stale" if any(version < oldest_version for version in versions) else None


def _transition(episode: Episode, position: int, credit: CallCredit) -> TransitionCredit:
    return TransitionCredit(
        episode_id=episode.id,
        episode=episode.key,
        call=episode.calls[position],
        position=position,
        r_final=credit.r_final,
        r_air=credit.r_air,
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        reason=credit.reason,
    )
