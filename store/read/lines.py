"""Encode an episode as one JSON line, for `pawl export` and for judges (pure)."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from store.errors import Damaged
from store.read.facts import MatchedEvent, compacted_by, has_failed, match_event, matched_events
from store.records import EXPLORED, REWARD, Episode, EpisodeState, Feedback, TransitionRow
from store.tenants import DEFAULT, bare, tenant_of
from store.values.documents import compact
from store.values.packing import unpack_ids, unpack_logprobs
from store.values.rewards import newest_statement
from store.versions import policy_name

# An episode without a reward counts as finished this long after its last call.
QUIET_PERIOD: Final = timedelta(minutes=10)


def episode_state(episode: Episode, now: datetime, quiet: timedelta = QUIET_PERIOD) -> EpisodeState:
    """Return whether an episode is scored, failed, still open, or finished without a score.

    A failed episode counts as scored only if the episode itself has a reward. A reward for one
    of its calls does not suffice: its other calls are still credited as those of a failure.
    An episode counts as finished `quiet` after its last call.
    """
    if _has_reward(episode.feedback):
        return "scored"
    if has_failed(episode):
        return "failed"
    if any(_has_reward(call.feedback) for call in episode.calls):
        return "scored"
    return "open" if now - episode.last_call_at < quiet else "unscored"


def _has_reward(statements: Sequence[Feedback]) -> bool:
    counts = newest_statement(statements, REWARD)
    return counts is not None and counts.value is not None


def encoded_line(
    episode: Episode,
    now: datetime,
    quiet: timedelta = QUIET_PERIOD,
    fates: Sequence[Mapping[str, str]] = (),
) -> bytes:
    """Return an episode as one compact JSON document, without a newline at its end (pure).

    `fates` are its outcomes for each policy (`store.read.browsing.fates_of`).

    Raises:
        Damaged: a request or reply is not a JSON document, or is nested too deeply to be read.
    """
    links = compacted_by(episode.calls)
    line: dict[str, Any] = {
        "episode": bare(episode.key),
        "task": episode.task and bare(episode.task),
        "split": episode.split,
        "state": episode_state(episode, now, quiet),
        **({"fates": fates} if fates else {}),
        "feedback": _statements(episode.feedback),
        "calls": [_call(episode, call, links.get(call.id)) for call in episode.calls],
    }
    unmatched = [
        event
        for call in episode.calls
        for event in call.tool_events
        if match_event(event, call.tool_calls) is None
    ]
    if stray := [*episode.stray_tool_events, *unmatched]:
        # Tool events that belong to no tool call of the episode: shown, but without effect.
        line["stray_tool_events"] = [
            {"id": event.tool_id, "name": event.name, "status": event.status} for event in stray
        ]
    tenant = tenant_of(episode.key)
    if tenant != DEFAULT:
        line["tenant"] = tenant
    if episode.quarantined_reason is not None:
        line["quarantined"] = episode.quarantined_reason
    return msgspec.json.encode(line)


def _call(episode: Episode, call: TransitionRow, compaction: UUID | None) -> dict[str, Any]:
    request, reply = _document(episode, call, "request"), _document(episode, call, "reply")
    line = {
        "call": str(call.id),
        "agent": call.agent,
        "policy": call.policy and policy_name(call.policy, call.policy_version or 0, call.policy),
        "request": request,
        "reply": reply,
        "prompt_ids": unpack_ids(call.tokens.prompt_ids),
        "sampled_ids": unpack_ids(call.tokens.sampled_ids),
        "sampled_logprobs": unpack_logprobs(call.tokens.sampled_logprobs),
        "sampling": {name: call.sampling[name] for name in call.sampling if name != EXPLORED},
        "trainable": call.trainable,
        "reason": call.reason,
        **({"lane": call.lane} if call.lane else {}),
        **({"side": call.side} if call.side else {}),
        **({"compacted_by": str(compaction)} if compaction else {}),
        "tool_events": [_event(event) for event in matched_events(call)],
        "feedback": _statements(call.feedback),
    }
    if EXPLORED in call.sampling:
        line[EXPLORED] = call.sampling[EXPLORED]
    return line


def _document(episode: Episode, call: TransitionRow, part: str) -> msgspec.Raw | None:
    """Return a recorded request or reply as compact JSON: a newline in it would end the line."""
    text: bytes | None = getattr(call, part)
    if text is None:
        return None
    try:
        return msgspec.Raw(compact(text))
    except ValueError as error:
        raise Damaged(
            f"episode {bare(episode.key)!r} cannot be read back: the {part} of call {call.id}: "
            f"{error}"
        ) from error


def _event(event: MatchedEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "name": event.tool,
        "status": event.status,
        "arguments": event.arguments,
    }


def _statements(statements: Sequence[Feedback]) -> list[dict[str, Any]]:
    return [
        {"metric": statement.metric, "value": statement.value, "at": statement.at.isoformat()}
        | ({"source": bare(statement.source)} if statement.source else {})
        | ({"late": True} if statement.late else {})
        | ({} if statement.correction is None else {"correction": statement.correction})
        for statement in statements
    ]
