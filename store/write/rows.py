"""Convert records to rows (pure): the columns given to COPY, and the values in that order.

No record is refused for its texts. PostgreSQL's text columns accept neither U+0000 nor a lone
surrogate: these are replaced by their escapes. A B-tree index accepts no entry of more than 2,704
bytes: a longer response id is left out. Request and reply are kept as bytes, and so unchanged.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

import msgspec

from store.records import (
    EVAL,
    FAILED_STATUSES,
    TRAIN,
    CallRecord,
    FeedbackItem,
    FeedbackRecord,
    ToolEvent,
    column_fields,
)
from store.tenants import bare, name_in_same_tenant
from store.write.bases import StoredTexts

Row = tuple[Any, ...]
# Returns a digest of the question in a call's request, or None. The store knows no wire formats.
QuestionDigest = Callable[[CallRecord], bytes | None]

# The columns that follow from the definition of a call's record, as they are and as JSON.
_PLAIN: Final = [field.name for field in column_fields(CallRecord) if not field.column.json]
_JSON: Final = [field.name for field in column_fields(CallRecord) if field.column.json]
_plain_of: Final = attrgetter(*_PLAIN)
_json_of: Final = attrgetter(*_JSON)
# A call's request and prompt, whole or as an addition to an earlier call's.
_STORED: Final = StoredTexts.__struct_fields__
_stored_of: Final = attrgetter(*_STORED)
TRANSITION_COLUMNS: Final = (
    *_PLAIN,
    *_JSON,
    "episode_id",
    *_STORED,
    "sampled_ids",
    "sampled_logprobs",
)
EVENT_COLUMNS: Final = (
    *("id", "episode_id", "target_kind", "target", "tool_id", "name"),
    *("status", "detail", "ms", "source", "quotes", "at"),
)
FEEDBACK_COLUMNS: Final = (
    *("id", "metric", "value", "label", "correction"),
    *("target_kind", "target", "source", "request_id", "at"),
)
# The HTTP status of a call that a model answered.
OK_STATUS: Final = 200
# A longer response id is not stored. No feedback can name it: /feedback does not accept it either.
MAX_INDEXED_BYTES: Final = 2048
# The texts of a call: those in columns of `transitions`, and those in other tables.
_TEXTS: Final = (
    *("episode", "task"),
    *(field.name for field in column_fields(CallRecord) if field.type is str),
)
_texts_of: Final = attrgetter(*_TEXTS)
_encode: Final = msgspec.json.Encoder().encode


def transition_row(call: CallRecord, episode_id: UUID, stored: StoredTexts) -> Row:
    """Return the row of a call, in the order of `TRANSITION_COLUMNS`."""
    return (
        *_plain_of(call),
        *map(_json_text, _json_of(call)),
        episode_id,
        *_stored_of(stored),
        call.tokens.sampled_ids,
        call.tokens.sampled_logprobs,
    )


def _json_text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode()
    return None if value is None else _encode(value).decode()


def event_row(
    event: ToolEvent,
    at: datetime,
    *,
    episode_id: UUID | None = None,
    item: FeedbackItem | None = None,
) -> Row:
    """Return the row of a tool event, in the order of `EVENT_COLUMNS`.

    An event of a call has an `episode_id`; one from feedback has the `item` that names its target.
    """
    return (
        event.id,
        episode_id,
        item.target_kind if item else None,
        item.target if item else None,
        event.tool_id,
        event.name,
        event.status,
        event.detail,
        event.ms,
        event.source,
        event.quotes or None,
        at,
    )


def feedback_row(item: FeedbackItem, record: FeedbackRecord) -> Row:
    """Return the row of a feedback item, in the order of `FEEDBACK_COLUMNS`."""
    is_text = isinstance(item.value, str)
    return (
        item.id,
        item.metric,
        None if is_text else item.value,
        item.value if is_text else None,
        item.correction,
        item.target_kind,
        item.target,
        item.source,
        record.id,
        record.at,
    )


def no_question(call: CallRecord) -> None:
    """Return None: no call has a known question."""


def derived_task(record: CallRecord, question_digest: QuestionDigest) -> str | None:
    """Return the task of a call that names none: a hash of its question.

    So episodes that begin with the same question form a group, even if their instructions contain
    the time of day, or if an outside model that gives no ids got the first call. Without a known
    question the task is a hash of the prompt ids. None: there is neither, or no model answered and
    there are no ids.
    """
    ids = record.tokens.prompt_ids
    if not ids and record.http_status != OK_STATUS:
        return None
    question = question_digest(record) or ids
    if not question:
        return None
    return name_in_same_tenant(record.episode, "prompt:" + sha256(question).hexdigest()[:32])


def episode_row(calls: Sequence[CallRecord], question_digest: QuestionDigest) -> Row:
    """Return the row of an episode, from those of its calls that are in one batch, earliest first.

    The columns are in the order of the upsert in `store.write.ingest`. The id of a new episode is
    that of its first call in this batch, so that no other id has to be made.
    """
    first = calls[0]
    task, task_named, task_from = _choose_task(calls, question_digest)
    return (
        first.id,
        first.episode,
        first.method,
        task,
        task_named,
        task_from,
        first.policy,
        first.policy_version,
        calls[-1].id,
        max(call.started_at for call in calls),
        calls[-1].http_status in FAILED_STATUSES,
        any(call.confidence == "doubtful" for call in calls),
        EVAL if any(call.split == EVAL for call in calls) else TRAIN,
    )


def _choose_task(
    calls: Sequence[CallRecord], question_digest: QuestionDigest
) -> tuple[str | None, bool, UUID | None]:
    """Return an episode's task, whether it is named, and the id of the call that it is from.

    It is the first named task, else the first derived one.
    """
    for call in calls:
        if call.task is not None:
            return call.task, True, call.id
    for call in calls:
        if (derived := derived_task(call, question_digest)) is not None:
            return derived, False, call.id
    return None, False, None


def storable_text(value: str) -> str:
    """Return `value` with escapes in place of the characters that text columns do not accept."""
    if value.isascii():
        return value.replace("\x00", "\\u0000")
    return value.replace("\x00", "\\u0000").encode(errors="backslashreplace").decode()


def storable_call(call: CallRecord) -> CallRecord:
    """Return the record with storable texts, or the record itself if all of them are.

    A response id of more than `MAX_INDEXED_BYTES` bytes is replaced by None.
    """
    texts = _texts_of(call)
    changed: dict[str, object] = {}
    # Nearly always all texts are storable, and one check of all together is cheaper.
    if not _is_plain("".join(filter(None, texts))):
        changed = {
            name: fixed
            for name, value in zip(_TEXTS, texts, strict=True)
            if value is not None and (fixed := storable_text(value)) != value
        }
    response_id = changed.get("response_id", call.response_id)
    if isinstance(response_id, str) and len(bare(response_id).encode()) > MAX_INDEXED_BYTES:
        changed["response_id"] = None
    if call.tool_events:
        events = tuple(map(storable_event, call.tool_events))
        if any(new is not old for new, old in zip(events, call.tool_events, strict=True)):
            changed["tool_events"] = events
    return msgspec.structs.replace(call, **changed) if changed else call


def storable_event(event: ToolEvent) -> ToolEvent:
    """Return the event with storable texts, or the event itself if all of them are."""
    changed = {
        name: fixed
        for name in ("tool_id", "name", "detail")
        if (value := getattr(event, name)) is not None and (fixed := storable_text(value)) != value
    }
    return msgspec.structs.replace(event, **changed) if changed else event


def _is_plain(value: str) -> bool:
    """Return whether a text is ASCII and storable unchanged; other texts may be storable, too."""
    return value.isascii() and "\x00" not in value
