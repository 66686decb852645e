"""Define the terms of the project (docs/glossary.md) as frozen values.

`CallRecord`, `FeedbackRecord`, `GapRecord` and `OutageRecord` are made by the proxy and kept in the
spool. Each has its id from the start, so that storing a record twice has the same effect as storing
it once.
"""

from collections.abc import Mapping
from datetime import datetime
from types import NoneType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

CallStatus = Literal["complete", "client_gone", "upstream_error", "truncated"]
ToolStatus = Literal["ok", "error", "timeout", "malformed", "denied"]
# Where the status of a tool comes from: the agent's header, /feedback, Anthropic's `is_error`, or a
# rule that read the result (`reader`). `not_offered`: the reply called a tool that its request does
# not offer. `assumed`: `is_error` was left out, which that API defines as success.
ToolSource = Literal["header", "feedback", "not_offered", "is_error", "reader", "assumed"]
TargetKind = Literal["episode", "call", "response"]
# Which version a new episode was given: the serving one, the one that is tried on a share of the
# episodes (canary), or an earlier one, at first the base model (control).
Arm = Literal["serving", "canary", "control"]
EpisodeState = Literal["scored", "unscored", "failed", "open"]
Confidence = Literal["certain", "likely", "doubtful"]
Split = Literal["train", "eval"]

CALL_STATUSES: Final = ("complete", "client_gone", "upstream_error", "truncated")
TOOL_STATUSES: Final = ("ok", "error", "timeout", "malformed", "denied")
TOOL_SOURCES: Final = ("header", "feedback", "not_offered", "is_error", "reader", "assumed")
CONFIDENCES: Final = ("certain", "likely", "doubtful")
SPLITS: Final = ("train", "eval")
TARGET_KINDS: Final = ("episode", "call", "response")
ARMS: Final[tuple[Arm, ...]] = get_args(Arm)
# `expired`: the update trained nothing; it consumed episodes that can never be trained any more.
UPDATE_STATES: Final = ("running", "done", "abandoned", "expired")
REWARD: Final = "reward"
TRAIN: Final = "train"
EVAL: Final = "eval"
# A call that names no split is evaluation if its task begins so (default of PAWL_EVAL_TASKS).
EVAL_TASKS: Final = "eval/"
# A key of a call's sampling settings: the settings that exploration changed, null if left out.
EXPLORED: Final = "explored"
# The reason not to train a side call (`proxy.side_calls`).
SIDE: Final = "side"
# The method of a call that named no episode and got an episode of its own.
OWN_EPISODE: Final = "own"


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all records: frozen, keyword-only, and not tracked by the garbage collector.

    `gc=False` is safe because records cannot refer to each other in a cycle.
    """


class ToolCall(Record, frozen=True, kw_only=True):
    """Describe a tool execution that a reply asked for."""

    id: str
    name: str
    arguments: str


class ToolEvent(Record, frozen=True, kw_only=True):
    """How one tool execution ended, and how that is known (`source`).

    `ms` is the execution's duration in milliseconds, if it was stated. `quotes` are the digests of
    the texts among the tool call's arguments, if the request with the result shows them. If the
    agent itself made the tool call from a reply's text, they show which reply that was. `at` is the
    time of recording, which the id does not tell; None: it is not stored yet.
    """

    id: UUID
    tool_id: str | None
    name: str | None
    status: ToolStatus
    detail: str | None = None
    ms: float | None = None
    source: ToolSource = "header"
    quotes: tuple[UUID, ...] = ()
    at: datetime | None = None


class Tokens(Record, frozen=True, kw_only=True):
    """The token ids of a prompt and of its sampled reply, with log-probabilities.

    Shapes: `prompt_ids` (P,), `sampled_ids` (S,), `sampled_logprobs` (S,) in nats. They are the
    little-endian int32 and float32 arrays that the store keeps (`store.values.packing`). If a
    server gave all ids but not all log-probabilities, `sampled_logprobs` is empty, and the trainer
    computes them with the version that sampled the ids.
    """

    prompt_ids: bytes = b""
    sampled_ids: bytes = b""
    sampled_logprobs: bytes = b""


class StoredColumn(NamedTuple):
    """Marks a field of a call that is a column of the same name in `transitions`.

    `about` describes the column. With `json` the value is stored as JSON: bytes have to be JSON,
    other values are encoded.
    """

    about: str = ""
    json: bool = False


class CallFacts(Record, frozen=True, kw_only=True):
    """The fields that a call's record and its stored row share.

    A field that is added here is stored and read back (docs/howto/add-a-field-of-a-call.md).
    `policy_version` is the version that the upstream was asked for; it is the same for the whole
    call. `reply` is JSON as text, so that numbers of any size are kept.
    """

    id: Annotated[UUID, StoredColumn("Id of the call, as in `x-pawl-call`.")]
    method: Annotated[
        str,
        StoredColumn(
            "How the call was assigned to its episode, such as `header`, `session` or `prefix`."
        ),
    ]
    # A doubtful call excludes its episode from training.
    confidence: Annotated[Confidence, StoredColumn("How sure that assignment is.")] = "certain"
    agent: Annotated[str, StoredColumn("Agent that made the call.")]
    lane: Annotated[
        str | None,
        StoredColumn("Thread of a sub-agent within the episode; null: the main agent's."),
    ] = None
    policy: Annotated[str | None, StoredColumn("Policy that served it; null: none.")]
    policy_version: Annotated[int | None, StoredColumn("Policy version that served it.")]
    status: Annotated[CallStatus, StoredColumn("How the call ended.")]
    http_status: Annotated[
        int | None, StoredColumn("Status of the upstream's reply; null: there was none.")
    ]
    reply: Annotated[bytes | None, StoredColumn("Reply (JSON); a stream's events put together.")]
    trainable: Annotated[bool, StoredColumn("Whether the call can carry loss.")]
    reason: Annotated[
        str | None, StoredColumn("Why it cannot carry loss (`proxy.trainable`); null: it can.")
    ]
    side: Annotated[
        str | None,
        StoredColumn(
            "Kind of a side call, such as `title` or `compaction`; null: it is the agent's work."
        ),
    ] = None


class CallRecord(CallFacts, frozen=True, kw_only=True, tag="call"):
    """Describe one request to a model and its single outcome, as the proxy saw them.

    `request`, `reply`, `sampling` and `usage` are JSON as text, so that numbers of any size are
    kept. A body that is not JSON is in `request_raw` or `reply_raw` instead. Fields without
    `StoredColumn` are in other tables, or shared with earlier calls
    (`store.write.bases.StoredTexts`).
    """

    episode: str
    task: str | None
    dialect: Annotated[str, StoredColumn("Wire format.")]
    served_model: Annotated[str | None, StoredColumn("Model name sent to the upstream.")]
    stream: Annotated[bool, StoredColumn("Whether the reply was streamed.")]
    request: bytes | None
    request_raw: Annotated[bytes | None, StoredColumn("Request body that is not JSON.")]
    reply_raw: Annotated[bytes | None, StoredColumn("Reply that is not JSON.")]
    response_id: Annotated[
        str | None, StoredColumn("Id in the reply, for feedback that names a `response`.")
    ]
    tokens: Tokens
    sampling: Annotated[
        bytes,
        StoredColumn(
            "Sampling settings that the call was sampled with; `explored` has those that "
            "exploration changed, null where it left one out.",
            json=True,
        ),
    ]
    tool_calls: Annotated[
        tuple[ToolCall, ...], StoredColumn("Tool executions that the reply asks for.", json=True)
    ]
    tool_events: tuple[ToolEvent, ...]
    usage: Annotated[
        bytes | None, StoredColumn("Token counts as the upstream reported them.", json=True)
    ]
    finish: Annotated[str | None, StoredColumn("Finish reason as the upstream reported it.")]
    started_at: Annotated[datetime, StoredColumn("Time of the request's arrival.")]
    first_chunk_ms: Annotated[
        float | None, StoredColumn("Milliseconds from arrival to the first byte passed on.")
    ]
    total_ms: Annotated[float, StoredColumn("Milliseconds from arrival to the end of the reply.")]
    retry: Annotated[int, StoredColumn("How often the SDK said it had sent this request before.")]
    # Fingerprints (16 bytes each) that later calls may repeat, and those that this call repeats,
    # the surest first. By these the store joins episodes that the proxy could not join.
    provides: tuple[bytes, ...] = ()
    needs: tuple[bytes, ...] = ()
    # The earlier attempt that this call repeats: sent by the same client, and without a reply.
    retry_of: Annotated[UUID | None, StoredColumn("Failed attempt that this call repeats.")] = None
    # An episode of which any call says `eval` is evaluation: it is never trained on.
    split: Annotated[Split, StoredColumn("`train`, or `eval` for a call of an evaluation.")] = TRAIN
    # An episode's arm is that of its first call: a version's arm may change while episodes keep it.
    arm: Annotated[
        Arm | None,
        StoredColumn(
            "Arm that its version was in when the call was made; null for a call that names "
            "its version, for evaluation, and where nothing is trained."
        ),
    ] = None
    api_key: Annotated[
        str | None,
        StoredColumn("Id of the API key that it came with; null: it came without one."),
    ] = None
    text_digest: Annotated[
        UUID | None,
        StoredColumn(
            "Digest of the reply's text, for comparison with `tool_events.quotes`; null: the reply "
            "has no text, or asks for tools, or results of tools are not read."
        ),
    ] = None
    # The client's trace context, for the call's span. It is not stored.
    trace: str | None = None


class FeedbackItem(Record, frozen=True, kw_only=True):
    """One statement about a target: a metric with a value, or (if `tool` is set) a tool event.

    A value is a number or a short text; None without a tool event withdraws the metric's value.
    `source` names the judge whose opinion the statement is; None: it is a fact. A `correction` is
    the reply that would have been right.
    """

    id: UUID
    metric: str
    value: float | str | None
    target_kind: TargetKind
    target: str
    source: str | None = None
    tool: ToolEvent | None = None
    correction: str | None = None


class FeedbackRecord(Record, frozen=True, kw_only=True, tag="feedback"):
    """The items of one POST to /feedback; all are stored, or none."""

    id: UUID
    at: datetime
    items: tuple[FeedbackItem, ...]
    idempotency_key: str | None = None
    body_hash: str | None = None
    # The id of the API key that it came with, if any.
    api_key: str | None = None


class GapRecord(Record, frozen=True, kw_only=True, tag="gap", array_like=True):
    """Marks episodes as incomplete, because records of their calls could not be written."""

    id: UUID
    episodes: tuple[str, ...]


class OutageRecord(Record, frozen=True, kw_only=True, tag="outage"):
    """A time in which a worker lost records of calls, and could not tell their episodes."""

    id: UUID
    since: datetime
    until: datetime


SpoolRecord = CallRecord | FeedbackRecord | GapRecord | OutageRecord


class Feedback(Record, frozen=True, kw_only=True):
    """A stored statement about an episode or one of its calls.

    `value` is a number or a short text; None withdraws an earlier value. `source` names the judge
    whose opinion the statement is; None: it is a fact. `late` tells that it came after an update
    had claimed the episode, so that the update trained without it. `correction` is the reply that
    would have been right.
    """

    metric: str
    value: float | str | None
    at: datetime
    source: str | None = None
    late: bool = False
    correction: str | None = None


class TransitionRow(CallFacts, frozen=True, kw_only=True):
    """A stored call, with the events of its reply's tool calls.

    `tool_calls` includes tool calls that the agent itself made from the reply's whole text.
    """

    episode_id: UUID
    request: bytes | None
    tokens: Tokens
    sampling: dict[str, Any]
    tool_calls: tuple[ToolCall, ...]
    tool_events: tuple[ToolEvent, ...] = ()
    feedback: tuple[Feedback, ...] = ()
    # How the call's episode was found.
    method: str = "header"


class Episode(Record, frozen=True, kw_only=True):
    """Describe one run of an agent system on one task: its calls in order, with their feedback."""

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
    # `eval` if any of its calls said so; the episode is then never claimed either.
    split: Split = TRAIN


class Group(Record, frozen=True, kw_only=True):
    """The episodes of one task that are compared with each other.

    Earlier updates have consumed the members in `earlier`: their returns count in mean and spread,
    and they are not trained again.
    """

    task: str
    episodes: tuple[Episode, ...]
    earlier: tuple[Episode, ...] = ()


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


# An episode failed if its last call ended in one of these: an upstream refused the request's
# content, which includes the policy's output, or its length. Other errors are the server's or the
# network's (docs/decisions/018-groups.md).
FAILED_STATUSES: Final = (400, 413, 422)


# The marked fields of a call's record define the columns of `transitions`, and which values are
# written and read back (docs/howto/add-a-field-of-a-call.md).


class ColumnField(NamedTuple):
    """A record's field that is a column: its type without None, and whether it may be null."""

    name: str
    type: Any
    null: bool
    column: StoredColumn


def column_fields(record: type[Record]) -> tuple[ColumnField, ...]:
    """Return the fields of a record type that are columns, in the order of their definition."""
    hints = get_type_hints(record, include_extras=True)
    marked = ((name, _column_of_hint(hints[name])) for name in record.__struct_fields__)
    return tuple(
        ColumnField(name, *_without_none(get_args(hints[name])[0]), mark)
        for name, mark in marked
        if mark is not None
    )


def _column_of_hint(hint: Any) -> StoredColumn | None:
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, StoredColumn)), None)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was in it; a `Literal` becomes `str`."""
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    null = NoneType in get_args(hint)
    kind = choices[0] if null else hint
    return (str if get_origin(kind) is Literal else kind), null
