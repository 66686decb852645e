"""Assemble database rows into an episode as it was recorded (pure).

An episode may have several parts (`store.link.joins`); it has the key of the earliest part. A call
that a later call repeats as a retry (`retry_of`) is left out: the two count as one call.

An agent's own code may execute a text that a model wrote, and present it to the next model as a
tool call that no reply made. The tool's result is then about the reply whose whole text is an
argument of that tool call, if the episode has exactly one earlier reply with this text
(docs/decisions/019-tool-event-sources.md).
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar, cast
from uuid import UUID

from store.errors import Damaged
from store.ids import time_of
from store.records import (
    OWN_EPISODE,
    CallFacts,
    Episode,
    Feedback,
    Record,
    Tokens,
    ToolCall,
    ToolEvent,
    TransitionRow,
)
from store.values.documents import parse
from store.values.packing import ITEM_BYTES, are_logprobs, rebuild
from store.values.sampling import distribution_of


class QuotedCall(Record, frozen=True, kw_only=True):
    """A reply whose text an agent executed, and the tool call that the agent made of it."""

    call_id: UUID
    text_digest: UUID
    tool_id: str
    name: str

    @property
    def tool_call(self) -> ToolCall:
        """Return the agent's tool call, with the text's digest in place of the arguments."""
        return ToolCall(id=self.tool_id, name=self.name, arguments=str(self.text_digest))


def quoted_calls(
    events: Iterable[Any], calls: Iterable[Any], requested: Container[str]
) -> Mapping[UUID, QuotedCall]:
    """Map the id of each tool event about an executed text to the reply with this text.

    An event that quotes nothing, such as a header's, is about the same text as the other events
    with its tool call id, if these agree. `requested` are the ids of tool calls that replies made;
    events about these are left out.
    """
    by_digest: dict[UUID, list[Any]] = {}
    for call in calls:
        if call.text_digest is not None:
            by_digest.setdefault(call.text_digest, []).append(call)
    made_up: dict[str, list[Any]] = {}
    for event in events:
        if event.tool_id and event.tool_id not in requested and event.asked_by is None:
            made_up.setdefault(event.tool_id, []).append(event)
    quoted: dict[UUID, QuotedCall] = {}
    for tool_id, own in made_up.items():
        quoted |= _quoted_by_tool_id(tool_id, own, by_digest)
    return quoted


def _quoted_by_tool_id(
    tool_id: str, events: Sequence[Any], by_digest: Mapping[UUID, Sequence[Any]]
) -> dict[UUID, QuotedCall]:
    """Map the ids of the events with one tool call id to the replies that they are about."""
    owners = {event.id: _quoted_call(event, by_digest) for event in events if event.quotes}
    known = {owner.id: owner for owner in owners.values() if owner is not None}
    only = next(iter(known.values())) if len(known) == 1 else None
    quoted = {}
    for event in events:
        owner = owners.get(event.id, only)
        if owner is not None:
            names = [one.name for one in events if one.name and owners.get(one.id) is owner]
            quoted[event.id] = QuotedCall(
                call_id=owner.id,
                text_digest=owner.text_digest,
                tool_id=tool_id,
                name=min(names, default=""),
            )
    return quoted


def _quoted_call(event: Any, by_digest: Mapping[UUID, Sequence[Any]]) -> Any:
    """Return the earlier call whose text the event quotes; None if there is none, or several."""
    quoted = [
        call
        for digest in set(event.quotes)
        for call in by_digest.get(digest, ())
        if time_of(call.id) < event.at
    ]
    return quoted[0] if len(quoted) == 1 else None


# An explicit status of a tool beats one that was inferred from its result.
_SURENESS: Final[Mapping[str, int]] = {
    "header": 4,
    "feedback": 4,
    "not_offered": 3,
    "is_error": 2,
    "reader": 1,
    "assumed": 0,
}
INCOMPLETE_DELTA: Final = "the lengths of the shared parts, or the added request, are missing"
# The fields that a stored call shares with its record.
_FACTS: Final = CallFacts.__struct_fields__
_facts_of: Final = attrgetter(*_FACTS)
Texts = tuple[bytes | None, bytes]
Id = TypeVar("Id")
_Settings = dict[str, Any]
_ToolCalls = tuple[ToolCall, ...]


class ReadableParts(NamedTuple):
    """The columns of a call that are rebuilt or parsed when the call is read."""

    request: bytes | None
    prompt_ids: bytes
    sampling: _Settings
    tool_calls: _ToolCalls


class FullTexts(NamedTuple):
    """Whole requests and prompt ids by call id (`of`), and why the others are `damaged`.

    A call's id is a key of exactly one of the two.
    """

    of: Mapping[UUID, Texts]
    damaged: Mapping[UUID, str]


def assemble(
    parts: Sequence[Any],
    rows: Sequence[Any],
    events: Iterable[Any],
    feedback: Iterable[Any],
    whole: FullTexts,
    trained_at: datetime | None = None,
) -> Episode:
    """Return the episode made of `parts`, which are sorted from the earliest on.

    `rows` are its calls, sorted by id; events and feedback are sorted by time and id. `whole` has
    the texts of at least these calls. `trained_at` is the claim time of the first update that
    trained on the episode; None: none did.

    Raises:
        Damaged: a call or a statement cannot be read back.
    """
    head = next((part for part in parts if part.root is None), parts[0])
    repeated_by = _repeated_by(rows)
    calls = [row for row in rows if row.id not in repeated_by]
    readable = {row.id: _readable(row, whole) for row in calls}
    events_of = _events_by_call(list(events), calls, readable, repeated_by)
    about = {
        call: tuple(_statement(one, trained_at) for one in own)
        for call, own in _feedback_by_call(feedback, parts, repeated_by).items()
    }
    transitions = tuple(
        _transition(row, readable[row.id], events_of.get(row.id, ()), about.get(row.id, ()))
        for row in calls
    )
    return Episode(
        id=head.id,
        key=head.key,
        task=head.joined_task or head.task,
        method=head.method,
        last_call_at=max(part.last_call_at for part in parts),
        calls=transitions,
        feedback=about.get(None, ()),
        stray_tool_events=tuple(map(_event, events_of.get(None, ()))),
        aliases=tuple(part.key for part in parts if part is not head),
        quarantined_reason=head.quarantined_reason,
        split=head.joined_split or head.split,
    )


def _events_by_call(
    events: Sequence[Any],
    calls: Sequence[Any],
    readable: dict[UUID, ReadableParts],
    repeated_by: Mapping[UUID, UUID],
) -> dict[UUID | None, list[Any]]:
    """Return the events that count, by call; None has the events that are about no call.

    Adds tool calls that the agent made of a reply's text to the reply's call in `readable`.
    """
    requested_by = {call.id: row.id for row in calls for call in readable[row.id].tool_calls}
    quoted = quoted_calls(events, calls, requested_by)
    for reply in dict.fromkeys(quoted.values()):
        read = readable[reply.call_id]
        readable[reply.call_id] = read._replace(tool_calls=(*read.tool_calls, reply.tool_call))

    def owner(event: Any) -> UUID | None:
        if event.id in quoted:
            return quoted[event.id].call_id
        asked_by = _last_attempt(repeated_by, event.asked_by) or requested_by.get(event.tool_id)
        return asked_by if asked_by in readable else None

    return group_rows(_newest_events(events, quoted), owner)


class ToolsByCall(NamedTuple):
    """Tool calls and events by call, and for each repeated attempt the call that repeats it.

    In `events`, None has the events that are about no call.
    """

    tool_calls: Mapping[UUID, tuple[ToolCall, ...]]
    events: Mapping[UUID | None, tuple[ToolEvent, ...]]
    repeated_by: Mapping[UUID, UUID]


def assign_tools(rows: Sequence[Any], events: Iterable[Any]) -> ToolsByCall:
    """Assign tool events to calls, as `assemble` does, without the calls' texts.

    Raises:
        Damaged: tool calls cannot be read, or a call is recorded as a retry of itself.
    """
    repeated_by = _repeated_by(rows)
    calls = [row for row in rows if row.id not in repeated_by]
    readable = {
        row.id: ReadableParts(None, b"", {}, _parsed(row, "tool_calls", _ToolCalls))
        for row in calls
    }
    of_calls = _events_by_call(list(events), calls, readable, repeated_by)
    return ToolsByCall(
        tool_calls={call: read.tool_calls for call, read in readable.items()},
        events={call: tuple(map(_event, own)) for call, own in of_calls.items()},
        repeated_by=repeated_by,
    )


def _feedback_by_call(
    feedback: Iterable[Any], parts: Sequence[Any], repeated_by: Mapping[UUID, UUID]
) -> dict[UUID | None, list[Any]]:
    """Return feedback rows by the id of their call; those about the whole episode are at None."""
    own = {part.id for part in parts if part.method == OWN_EPISODE}
    return group_rows(
        feedback,
        lambda one: None if one.episode_id in own else _last_attempt(repeated_by, one.call_id),
    )


def group_rows(rows: Iterable[Any], about: Callable[[Any], Id]) -> dict[Id, list[Any]]:
    """Group rows by the key that `about` returns, in the order of `rows`."""
    groups: dict[Id, list[Any]] = {}
    for row in rows:
        groups.setdefault(about(row), []).append(row)
    return groups


Whole = TypeVar("Whole")


def rebuild_calls(
    rows: Iterable[Any],
    wanted: Iterable[UUID],
    make: Callable[[Any, Any, Whole | None], Whole | None],
) -> tuple[dict[UUID, Whole], dict[UUID, str]]:
    """Return the wanted calls rebuilt with `make`, and why damaged calls cannot be rebuilt.

    `rows` are the wanted calls and all calls that these are stored as additions to (their bases).
    `make` gets a row, its base's row, and the result for the base (None without a base). A chain
    of bases is rebuilt from the nearest wanted call on.
    """
    by_id, kept = {row.id: row for row in rows}, set(wanted)
    made: dict[UUID, Whole] = {}
    damaged: dict[UUID, str] = {}
    for call_id in sorted(kept):
        chain: dict[UUID, Any] = {}
        call = by_id.get(call_id)
        while call is not None and not any(call.id in known for known in (made, damaged, chain)):
            chain[call.id] = call
            call = by_id.get(call.parent_id)
        whole = None if call is None else made.get(call.id)
        for call in reversed(chain.values()):
            base = by_id.get(call.parent_id)
            try:
                if call.parent_id is not None and (base is None or whole is None):
                    lost = "is missing" if base is None else "cannot be read back"
                    raise ValueError(f"that call {lost}")
                whole = make(call, base, whole)
            except ValueError as error:
                whole = None
                adds = "" if call.parent_id is None else f" adds to {call.parent_id}"
                damaged[call.id] = f"call {call.id}{adds}: {error}"
            if whole is not None and call.id in kept:
                made[call.id] = whole
    return made, damaged


def full_texts(rows: Sequence[Any]) -> FullTexts:
    """Rebuild each call's request and prompt ids; `rows` include all bases of the calls."""
    return FullTexts(*rebuild_calls(rows, [row.id for row in rows], _rebuild_request_and_prompt))


def _rebuild_request_and_prompt(row: Any, base: Any, whole: Texts | None) -> Texts:
    if any(len(values) % ITEM_BYTES for values in (row.sampled_ids, row.sampled_logprobs)):
        raise ValueError(
            f"its sampled ids or log-probabilities are not a multiple of {ITEM_BYTES} bytes"
        )
    if whole is None:
        return row.request, row.prompt_ids
    if row.prompt_prefix is None:
        raise ValueError(INCOMPLETE_DELTA)
    context = whole[1] + base.sampled_ids
    request = full_request(row, base, whole[0])
    return request, rebuild(context, row.prompt_prefix, 0, row.prompt_ids)


def full_request(row: Any, _: Any, base: bytes | None) -> bytes | None:
    """Return a call's request, which may be stored as an addition to the request `base`.

    Raises:
        ValueError: the request cannot be read back.
    """
    if row.parent_id is None:
        return cast("bytes | None", row.request)
    if None in (row.request_prefix, row.request_suffix, row.request):
        raise ValueError(INCOMPLETE_DELTA)
    return rebuild(base or b"", row.request_prefix, row.request_suffix, row.request)


def _readable(row: Any, whole: FullTexts) -> ReadableParts:
    """Return a call's rebuilt and parsed parts, after checking that they are consistent."""
    if row.id in whole.damaged:
        raise Damaged(whole.damaged[row.id])
    request, prompt_ids = whole.of[row.id]
    if len(prompt_ids) % ITEM_BYTES:
        raise Damaged(f"prompt_ids of call {row.id} are not a multiple of {ITEM_BYTES} bytes")
    sampling: _Settings = _parsed(row, "sampling", _Settings)
    tool_calls: _ToolCalls = _parsed(row, "tool_calls", _ToolCalls)
    if row.trainable:
        _check_trainable(row, prompt_ids, sampling)
    return ReadableParts(request, prompt_ids, sampling, tool_calls)


def _check_trainable(row: Any, prompt_ids: bytes, sampling: _Settings) -> None:
    """Raise `Damaged` if a value that the trainer computes with is missing or invalid."""
    # The trainer computes missing log-probabilities.
    if row.sampled_logprobs and len(row.sampled_ids) != len(row.sampled_logprobs):
        raise Damaged(f"call {row.id} has different numbers of sampled ids and log-probabilities")
    if not prompt_ids or not row.sampled_ids:
        raise Damaged(f"call {row.id} is marked as trainable and has no token ids")
    if not are_logprobs(row.sampled_logprobs):
        raise Damaged(f"call {row.id} has a value that cannot be a sampled token's log-probability")
    try:
        distribution_of(sampling)
    except ValueError as error:
        raise Damaged(f"call {row.id} is marked as trainable, and its {error}") from error


def _parsed(row: Any, column: str, kind: Any) -> Any:
    try:
        return parse(getattr(row, column).encode(), kind)
    except ValueError as error:
        raise Damaged(f"{column} of call {row.id}: {error}") from error


def _repeated_by(rows: Iterable[Any]) -> dict[UUID, UUID]:
    """Map each attempt that was repeated to the call that repeats it (`retry_of`)."""
    repeats = {row.retry_of: row.id for row in rows if row.retry_of is not None}
    for attempt in repeats:
        seen: set[UUID] = set()
        call: UUID | None = attempt
        while call is not None:
            if call in seen:
                raise Damaged(f"call {attempt} is recorded as a retry of itself")
            seen.add(call)
            call = repeats.get(call)
    return repeats


def _last_attempt(repeated_by: Mapping[UUID, UUID], call_id: UUID | None) -> UUID | None:
    """Return the last repetition of a call, which counts; the call itself if none repeats it."""
    while call_id is not None and call_id in repeated_by:
        call_id = repeated_by[call_id]
    return call_id


def _newest_events(rows: Iterable[Any], quoted: Mapping[UUID, QuotedCall]) -> list[Any]:
    """Return the newest event of the surest source for each tool call, and all without an id."""
    kept: dict[Any, Any] = {}
    for row in rows:
        # An agent may give all tool calls that it makes of texts the same id.
        about = quoted.get(row.id) or row.tool_id or row.id
        earlier = kept.get(about)
        if earlier is None or _SURENESS[row.source] >= _SURENESS[earlier.source]:
            kept[about] = row
    return list(kept.values())


def _transition(
    row: Any, read: ReadableParts, events: Sequence[Any], statements: tuple[Feedback, ...]
) -> TransitionRow:
    return TransitionRow(
        **dict(zip(_FACTS, _facts_of(row), strict=True)),
        episode_id=row.episode_id,
        request=read.request,
        tokens=Tokens(
            prompt_ids=read.prompt_ids,
            sampled_ids=row.sampled_ids,
            sampled_logprobs=row.sampled_logprobs,
        ),
        sampling=read.sampling,
        tool_calls=read.tool_calls,
        tool_events=tuple(_event(event) for event in events),
        feedback=statements,
    )


def _event(row: Any) -> ToolEvent:
    return ToolEvent(
        id=row.id,
        tool_id=row.tool_id,
        name=row.name,
        status=row.status,
        detail=row.detail,
        ms=row.ms,
        source=row.source,
        at=row.at,
    )


def _statement(row: Any, trained_at: datetime | None) -> Feedback:
    if row.value is not None and not math.isfinite(row.value):
        raise Damaged(f"feedback {row.id} has the value {row.value}, which is not finite")
    value = row.label if row.value is None else row.value
    is_late = trained_at is not None and row.at > trained_at
    return Feedback(
        metric=row.metric,
        value=value,
        at=row.at,
        source=row.source,
        late=is_late,
        correction=row.correction,
    )
