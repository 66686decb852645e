"""The words of DESIGN.md §1 as frozen values.

`CallRecord` and `FeedbackRecord` are what the proxy makes and the spool keeps: they carry
their ids from birth, so that storing one twice is storing it once.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

CallStatus = Literal["complete", "client_gone", "upstream_error", "truncated"]
ToolStatus = Literal["ok", "error", "timeout", "malformed", "denied"]
# Who said how a tool ended: the agent's header, /feedback, Anthropic's `is_error`, a rule that
# read the result; `assumed` is what that API means where `is_error` is left out.
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
# `expired`: it trained nothing, and spent what could not be trained any more.
UPDATE_STATES: Final = ("running", "done", "abandoned", "expired")
REWARD: Final = "reward"
# The method of a call that named no episode and got one of its own.
OWN_EPISODE: Final = "own"


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all records: frozen, by keyword only; they cannot make a cycle."""


class ToolCall(Record, frozen=True, kw_only=True):
    """A tool execution that a reply asked for."""

    id: str
    name: str
    arguments: str


class ToolEvent(Record, frozen=True, kw_only=True):
    """How one tool execution ended."""

    id: UUID
    tool_id: str | None
    name: str | None
    status: ToolStatus
    detail: str | None = None
    ms: float | None = None
    source: ToolSource = "header"


class Tokens(Record, frozen=True, kw_only=True):
    """What the server saw and sampled.

    Shapes: `prompt_ids` (P,), `sampled_ids` (S,), `sampled_logprobs` (S,) in nats, as the
    little-endian int32 and float32 arrays that the store keeps.
    """

    prompt_ids: bytes = b""
    sampled_ids: bytes = b""
    sampled_logprobs: bytes = b""


class CallRecord(Record, frozen=True, kw_only=True, tag="call"):
    """One request to a model and its single outcome, as the proxy saw them.

    `request`, `reply`, `sampling` and `usage` are JSON as text, so that no number in it is
    too large to be kept; what was said that is not JSON is `request_raw`, `reply_raw`.
    `policy_version` is what the upstream was asked for, at the start and to the end.
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
    # How sure it is that the call belongs to `episode`; a doubtful one is not trained on.
    confidence: Confidence = "certain"
    # Digests of what a later call may repeat of this one, and of what this one repeats, the
    # surest first; the store joins by them what the proxy could not (16 bytes each).
    offers: tuple[bytes, ...] = ()
    asks: tuple[bytes, ...] = ()
    # The attempt, sent by the same client before and come to no reply, that this one repeats.
    retry_of: UUID | None = None


class FeedbackItem(Record, frozen=True, kw_only=True):
    """One statement: a metric, a value, a target; or a tool event about a target."""

    id: UUID
    metric: str
    value: float | None
    target_kind: TargetKind
    target: str
    tool: ToolEvent | None = None


class FeedbackRecord(Record, frozen=True, kw_only=True, tag="feedback"):
    """What one POST to /feedback stated; its items stand or fall together."""

    id: UUID
    at: datetime
    items: tuple[FeedbackItem, ...]
    idempotency_key: str | None = None
    body_hash: str | None = None


class GapRecord(Record, frozen=True, kw_only=True, tag="gap"):
    """Calls of these episodes were lost before they could be kept: they are not whole."""

    id: UUID
    episodes: tuple[str, ...]


SpoolRecord = CallRecord | FeedbackRecord | GapRecord


class Feedback(Record, frozen=True, kw_only=True):
    """A stored statement about an episode or one of its calls."""

    metric: str
    value: float
    at: datetime


class TransitionRow(Record, frozen=True, kw_only=True):
    """A stored call, with the tool events of what it asked for."""

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
    # How it is known that the call belongs to its episode.
    method: str = "header"
    confidence: str = "certain"


class Episode(Record, frozen=True, kw_only=True):
    """One run of an agent system on one task: its calls in order, and what was said of it."""

    id: UUID
    key: str
    task: str | None
    method: str
    last_call_at: datetime
    calls: tuple[TransitionRow, ...]
    feedback: tuple[Feedback, ...] = ()
    stray_tool_events: tuple[ToolEvent, ...] = ()
    # The keys of episodes that turned out to be parts of this one.
    aliases: tuple[str, ...] = ()
    # Why it is never claimed; None where it may be.
    quarantined_reason: str | None = None


class Group(Record, frozen=True, kw_only=True):
    """The episodes of one task that are compared with each other.

    `earlier` ones were consumed before these came: their returns count in mean and spread,
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
    """What was trained into which version."""

    id: UUID
    policy: str
    parent_version: int
    version: int | None
    state: str
    claimed_at: datetime
    finished_at: datetime | None
    metrics: Mapping[str, Any]


def has_failed(status: str, http_status: int | None) -> bool:
    """Whether a call did not come to a proper reply."""
    return status != "complete" or (http_status or 0) >= 400


def policy_name(policy: str, version: int, base_name: str) -> str:
    """The name a version is served under: the base model's own, or `NAME@N`."""
    return base_name if version == 0 else f"{policy}@{version}"
