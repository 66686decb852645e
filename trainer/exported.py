"""Read exported episodes, and group them into updates for `pawl train` (pure)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec

from store.records import (
    EVAL,
    FAILED_STATUSES,
    Episode,
    Group,
    Tokens,
    ToolCall,
    ToolEvent,
    TransitionRow,
)
from store.tenants import scoped
from store.values.packing import pack_ids, pack_logprobs
from store.values.rewards import reward_of
from store.values.sampling import distribution_of
from trainer.credit.lines import CallLine, EpisodeLine, EventLine, read_lines_as
from trainer.errors import CreditLineError
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import IMITABLE

UNIX_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class TokenCallLine(CallLine, frozen=True, kw_only=True):
    """One exported call, with the fields for training: ids, log-probabilities and sampling."""

    policy: str | None = None
    prompt_ids: tuple[int, ...] = ()
    sampled_logprobs: tuple[float, ...] = ()
    sampling: dict[str, Any] | None = None
    request: msgspec.Raw = msgspec.Raw(b"null")


class TokenEpisodeLine(EpisodeLine, frozen=True, kw_only=True):
    """One exported episode, whose calls have token ids."""

    calls: tuple[TokenCallLine, ...]


def read_episodes(lines: Iterable[bytes], where: str) -> list[Episode]:
    """Parse lines of `pawl export` into the store's episodes; `where` names their file in errors.

    Raises:
        CreditLineError: a line is no episode, or lacks a field for training, which is named.
    """
    return [_parse_episode(line, where) for line in read_lines_as(lines, where, TokenEpisodeLine)]


def _parse_episode(line: TokenEpisodeLine, where: str) -> Episode:
    key = scoped(line.tenant, line.episode)
    own_id = uuid5(NAMESPACE_URL, key)
    feedback = (*line.feedback, *(item for call in line.calls for item in call.feedback))
    # Only corrections need the requests.
    keeps_requests = any(item.correction for item in feedback)
    calls = [
        _parse_call(call, own_id, f"{where}, episode {line.episode!r}", keeps_requests)
        for call in line.calls
    ]
    if line.state == "failed" and calls:
        # The exported state "failed" was derived from the last call's HTTP status.
        fields = {name: getattr(calls[-1], name) for name in TransitionRow.__struct_fields__}
        calls[-1] = TransitionRow(**(fields | {"http_status": FAILED_STATUSES[0]}))
    return Episode(
        id=own_id,
        key=key,
        task=line.task and scoped(line.tenant, line.task),
        method="header",
        last_call_at=UNIX_EPOCH,
        calls=tuple(calls),
        feedback=tuple(item.feedback for item in line.feedback),
        quarantined_reason=line.quarantined,
        split=line.split,
    )


def _parse_call(
    line: TokenCallLine, episode: UUID, where: str, keeps_requests: bool
) -> TransitionRow:
    if line.trainable or line.reason in IMITABLE:
        why = _unusable_field(line)
        if why is not None:
            raise CreditLineError(
                f"{where}, call {line.call!r}: {why}; write the file again with this version's"
                " `pawl export`"
            )
    policy, _, version = (line.policy or "").partition("@")
    return TransitionRow(
        id=uuid5(episode, line.call),
        method="header",
        agent=line.agent,
        policy=policy or None,
        policy_version=int(version or 0) if policy else None,
        status="complete",
        http_status=None,
        reply=None,
        trainable=line.trainable,
        reason=line.reason,
        episode_id=episode,
        request=bytes(line.request) if keeps_requests else None,
        tokens=Tokens(
            prompt_ids=pack_ids(line.prompt_ids),
            sampled_ids=pack_ids(line.sampled_ids),
            sampled_logprobs=pack_logprobs(line.sampled_logprobs),
        ),
        sampling=line.sampling or {},
        tool_calls=tuple(
            ToolCall(id=event.id, name=event.name or "", arguments=event.arguments)
            for event in line.tool_events
            if event.id is not None and event.arguments is not None
        ),
        tool_events=tuple(
            _event(event, uuid5(episode, f"{line.call} {number}"))
            for number, event in enumerate(line.tool_events)
        ),
        feedback=tuple(item.feedback for item in line.feedback),
    )


def _unusable_field(line: TokenCallLine) -> str | None:
    """Return which field keeps a call from being trained, and why; None if all are usable."""
    for name in ("prompt_ids", "sampled_ids"):
        if not getattr(line, name):
            return f"{name} is missing or empty"
    if line.sampling is None:
        return "sampling is missing"
    if len(line.sampled_logprobs) not in (0, len(line.sampled_ids)):
        return "sampled_logprobs is not as long as sampled_ids"
    if line.policy is None or not (line.policy.partition("@")[2] or "0").isdecimal():
        return f"policy is {line.policy!r}, and must be NAME or NAME@N"
    try:
        if line.trainable:
            distribution_of(line.sampling)
    except ValueError as error:
        return f"sampling: {error}"
    return None


def _event(line: EventLine, event_id: UUID) -> ToolEvent:
    return ToolEvent(id=event_id, tool_id=line.id, name=line.name, status=line.status)


def policies_of(episodes: Iterable[Episode]) -> list[str]:
    """Return the policies of the calls that can be trained or imitated, sorted by name."""
    calls = (call for episode in episodes for call in episode.calls)
    return sorted({c.policy for c in calls if c.policy and (c.trainable or c.reason in IMITABLE)})


def groups_by_update(
    episodes: Sequence[Episode], recipe: Recipe, policy: str
) -> tuple[list[tuple[Group, ...]], Mapping[str, int]]:
    """Return the groups of each update, and the number of episodes in no update, by reason.

    The trainer would make the same claims if the episodes arrived one by one in this order. An
    update takes groups of one task, and single episodes without a task, until it has enough
    episodes with a signal; groups without a signal are taken along. The last episodes form short
    groups and a short update; without any signal they are in no update (`no_signal`).
    """
    unused: Counter[str] = Counter()
    by_task: dict[str | UUID, list[tuple[int, Episode]]] = {}
    rule = recipe.claim
    for place, episode in enumerate(episodes):
        if why := _why_unused(episode, recipe, policy):
            unused[why] += 1
        else:
            by_task.setdefault(episode.task or episode.id, []).append((place, episode))
    groups: list[tuple[int, Group]] = []
    for members in by_task.values():
        for start in range(0, len(members), rule.group_size):
            chunk = members[start : start + rule.group_size]
            task = chunk[0][1].task or ""
            group = Group(task=task, episodes=tuple(episode for _, episode in chunk))
            groups.append((chunk[-1][0], group))
    updates: list[tuple[Group, ...]] = []
    taken: list[Group] = []
    signals = 0
    for _, group in sorted(groups, key=lambda pair: pair[0]):
        taken.append(group)
        signals += len(group.episodes) if _has_signal(group, recipe) else 0
        if signals >= rule.groups * rule.group_size:
            updates.append(tuple(taken))
            taken, signals = [], 0
    if signals:
        updates.append(tuple(taken))
    else:
        unused["no_signal"] += sum(len(group.episodes) for group in taken)
    return updates, unused


def _episode_reward(episode: Episode, recipe: Recipe) -> float | None:
    reward = reward_of(episode.feedback, recipe.reward_rule).value
    if reward is None and episode.calls and episode.calls[-1].http_status in FAILED_STATUSES:
        return recipe.failed_reward
    return reward


def _why_unused(episode: Episode, recipe: Recipe, policy: str) -> str | None:
    if episode.split == EVAL:
        return "evaluation"
    if episode.quarantined_reason is not None:
        return "quarantined"
    imitated = IMITABLE if recipe.imitation_rule is not None else ()
    if not any(c.policy == policy and (c.trainable or c.reason in imitated) for c in episode.calls):
        return "no_trainable_call"
    if recipe.teacher is not None:
        return None
    of_calls = recipe.credit.pays_single_calls and any(
        reward_of(call.feedback, recipe.reward_rule).value is not None for call in episode.calls
    )
    return None if of_calls or _episode_reward(episode, recipe) is not None else "unscored"


def _has_signal(group: Group, recipe: Recipe) -> bool:
    """Return whether the trainer would count a group as signal (`store.claim_query.ClaimRule`)."""
    if recipe.credit.pays_single_calls:
        return True
    rewards = {_episode_reward(episode, recipe) for episode in group.episodes}
    if recipe.imitation_rule is not None:
        return any(
            value is not None and value >= recipe.imitation_rule.min_reward for value in rewards
        )
    return len(rewards) > 1 or len(group.episodes) == 1 or not recipe.credit.compares_episodes
