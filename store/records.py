"""The terms of the project (docs/glossary.md) as frozen values.

`CallRecord`, `FeedbackRecord` and `GapRecord` are made by the proxy and kept in the spool. Each has
its id from the start, so that storing a record twice has the same effect as storing it once.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

CallStatus = Literal["complete", "client_gone", "upstream_error", "truncated"]
ToolStatus = Literal["ok", "error", "timeout", "malformed", "denied"]
# Where the status of a tool comes from: the agent's header, /feedback, Anthropic's `is_error`, or a
# rule that read the result (`reader`). `assumed`: `is_error` was left out, which that API defines
# as success.
ToolSource = Literal["header", "feedback", "is_error", "reader", "assumed"]
TargetKind = Literal["episode", "call", "response"]
PolicyState = Literal["written", "published", "serving", "retired", "rejected"]
EpisodeState = Literal["scored", "unscored", "failed", "open"]
Confidence = Literal["certain", "likely", "doubtful"]

CALL_STATUSES: Final = ("complete", "client_gone", "upstream_error", "truncated")
TOOL_STATUSES: Final = ("ok", "error", "timeout", "malformed", "denied")
TOOL_SOURCES: Final = ("header", "feedback", "is_error", "reader", "assumed")
CONFIDENCES: Final = ("certain", "likely", "doubtful")
TARGET_KINDS: Final = ("episode", "call", "response")
POLICY_STATES: Final = ("written", "published", "serving", "retired", "rejected")
# `expired`: the update trained nothing; it consumed episodes that can never be trained any more.
UPDATE_STATES: Final = ("running", "done", "abandoned", "expired")
REWARD: Final = "reward"
# The method of a call that named no episode and got an episode of its own.
OWN_EPISODE: Final = "own"


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all records: frozen, keyword-only, and not tracked by the garbage collector.

    `gc=False` is safe because records cannot refer to each other in a cycle.
    """


class ToolCall(Record, frozen=True, kw_only=True):
    """A tool execution that a reply asked for."""

    id: str
    name: str
    arguments: str


class ToolEvent(Record, frozen=True, kw_only=True):
    """The end of one tool execution: its status, and where that is known from.

    `ms` is the execution's duration in milliseconds, if it was stated.
    """

    id: UUID
    tool_id: str | None
    name: str | None
    status: ToolStatus
    detail: str | None = None
    ms: float | None = None
    source: ToolSource = "header"


class Tokens(Record, frozen=True, kw_only=True):
    """The token ids of a prompt and of its sampled reply, with log-probabilities.

    Shapes: `prompt_ids` (P,), `sampled_ids` (S,), `sampled_logprobs` (S,) in nats. They are the
    little-endian int32 and float32 arrays that the store keeps (`store.values.tokens`).
    """

    prompt_ids: bytes = b""
    sampled_ids: bytes = b""
    sampled_logprobs: bytes = b""


class CallRecord(Record, frozen=True, kw_only=True, tag="call"):
    """One request to a model and its single outcome, as the proxy saw them.

    `request`, `reply`, `sampling` and `usage` are JSON as text, so that numbers of any size are
    kept. A body that is not JSON is in `request_raw` or `reply_raw` instead. `policy_version` is
    the version that the upstream was asked for; it is the same for the whole call.
    """

    id: UUID
    episode: str
    method: str
    agent: str
    task: str | None
    dialect: str
    policy: str | None
    policy_version: int | None
    served_model: str | None
    status: CallStatus
    http_status: int | None
    stream: bool
    request: bytes | None
    request_raw: bytes | None
    reply: bytes | None
    reply_raw: bytes | None
    response_id: str | None
    tokens: Tokens
    sampling: bytes
    trainable: bool
    reason: str | None
    tool_calls: tuple[ToolCall, ...]
    tool_events: tuple[ToolEvent, ...]
    usage: bytes | None
    finish: str | None
    started_at: datetime
    first_chunk_ms: float | None
    total_ms: float
    retry: int
    # How sure it is that the call belongs to `episode`. A doubtful call excludes its episode from
    # training.
    confidence: Confidence = "certain"
    # Fingerprints (16 bytes each) of what a later call may repeat of this one, and of what this one
    # repeats, the surest first. By these the store joins episodes that the proxy could not join.
    provides: tuple[bytes, ...] = ()
    needs: tuple[bytes, ...] = ()
    # The earlier attempt that this call repeats: sent by the same client, and without a reply.
    retry_of: UUID | None = None


class FeedbackItem(Record, frozen=True, kw_only=True):
    """One statement about a target: a metric with a value, or (if `tool` is set) a tool event."""

    id: UUID
    metric: str
    value: float | None
    target_kind: TargetKind
    target: str
    tool: ToolEvent | None = None


class FeedbackRecord(Record, frozen=True, kw_only=True, tag="feedback"):
    """The items of one POST to /feedback; they are stored all or none."""

    id: UUID
    at: datetime
    items: tuple[FeedbackItem, ...]
    idempotency_key: str | None = None
    body_hash: str | None = None


class GapRecord(Record, frozen=True, kw_only=True, tag="gap"):
    """A mark that calls of these episodes were lost before they could be kept."""

    id: UUID
    episodes: tuple[str, ...]


SpoolRecord = CallRecord | FeedbackRecord | GapRecord


class Feedback(Record, frozen=True, kw_only=True):
    """A stored statement about an episode or one of its calls."""

    metric: str
    value: float
    at: datetime


class TransitionRow(Record, frozen=True, kw_only=True):
    """A stored call, with the events of the tools that its reply asked for."""

    id: UUID
    episode_id: UUID
    agent: str
    policy: str | None
    policy_version: int | None
    status: str
    http_status: int | None
    request: bytes | None
    reply: bytes | None
    tokens: Tokens
    sampling: dict[str, Any]
    trainable: bool
    reason: str | None
    tool_calls: tuple[ToolCall, ...]
    tool_events: tuple[ToolEvent, ...] = ()
    feedback: tuple[Feedback, ...] = ()
    # How the call's episode was found, and with which confidence.
    method: str = "header"
    confidence: str = "certain"


class Episode(Record, frozen=True, kw_only=True):
    """One run of an agent system on one task: its calls in order, and the feedback on it."""

    id: UUID
    key: str
    task: str | None
    method: str
    last_call_at: datetime
    calls: tuple[TransitionRow, ...]
    feedback: tuple[Feedback, ...] = ()
    stray_tool_events: tuple[ToolEvent, ...] = ()
    # The keys of the other parts, if several recorded episodes were joined into this one.
    aliases: tuple[str, ...] = ()
    # Why the episode is never claimed; None if it may be.
    quarantined_reason: str | None = None


class Group(Record, frozen=True, kw_only=True):
    """The episodes of one task that are compared with each other.

    Earlier updates have consumed the members in `earlier`: their returns count in mean and spread,
    and they are not trained again.
    """

    task: str
    episodes: tuple[Episode, ...]
    earlier: tuple[Episode, ...] = ()


class PolicyVersion(Record, frozen=True, kw_only=True):
    """One immutable version of a policy. Version 0 is the base model."""

    name: str
    version: int
    state: PolicyState
    served_name: str
    adapter_path: str | None
    update_id: UUID | None


class UpdateRow(Record, frozen=True, kw_only=True):
    """A row of `updates`: the update's state, its parent version and the version it made."""

    id: UUID
    policy: str
    parent_version: int
    version: int | None
    state: str
    claimed_at: datetime
    finished_at: datetime | None
    metrics: Mapping[str, Any]


def has_failed(status: str, http_status: int | None) -> bool:
    """Return whether a call came to no proper reply: it is incomplete, or an HTTP error."""
    return status != "complete" or (http_status or 0) >= 400


def policy_name(policy: str, version: int, base_name: str) -> str:
    """Return the name that a version is served under: the base model's own, or `NAME@N`."""
    return base_name if version == 0 else f"{policy}@{version}"
