"""Redact the record of a call: what is left of it says nothing that was taken out (pure).

Token ids are the text, and a fingerprint can be checked against a guess: what was made of a text
that was redacted goes with it.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from proxy.calls.trainable import Reason
from proxy.formats.base import read_request
from proxy.formats.repeated import repeated_name
from proxy.identity.stitch import PREFIXES
from proxy.redaction.fields import with_field, without_ids
from proxy.redaction.texts import Patterns
from store.records import (
    CallRecord,
    FeedbackItem,
    FeedbackRecord,
    Tokens,
    ToolCall,
    ToolEvent,
)

REDACTED: Final[Reason] = "redacted"
WITHHELD: Final = b'"[withheld]"'


class FieldRule(NamedTuple):
    """Say which field of a call is replaced, whatever it holds, by the JSON `instead`."""

    name: str
    # Whether it is one of the reply; otherwise it is one of the request.
    of_reply: bool
    path: tuple[str, ...]
    instead: bytes


class Rules(NamedTuple):
    """Hold all rules of redaction."""

    patterns: Patterns
    fields: Sequence[FieldRule]


class Redacted(NamedTuple):
    """Hold a call's record as it may be stored, and what was done to it.

    `by` names the rules that hit. `withheld` says that a body that is not JSON was left out: rules
    cannot be applied to it.
    """

    record: CallRecord
    by: frozenset[str] = frozenset()
    withheld: bool = False


def redact_call(record: CallRecord, rules: Rules) -> Redacted:
    """Return a call's record without what the rules take out; it is `record` if they find nothing.

    Raises:
        Exception: it cannot be redacted, and must not be stored as it is.
    """
    hits: set[str] = set()
    record = _without_repeats(record, rules)
    request = _document(record.request, rules, hits, of_reply=False)
    reply = _document(record.reply, rules, hits, of_reply=True)
    fields = {rule.name for rule in rules.fields} & hits
    left = msgspec.structs.replace(
        record,
        request=request,
        reply=reply,
        sampling=rules.patterns.document(record.sampling, hits),
        tool_calls=tuple(_call(call, rules.patterns, hits) for call in record.tool_calls),
        tool_events=tuple(_event(event, rules.patterns, hits) for event in record.tool_events),
    )
    withheld = bool(record.request_raw or record.reply_raw)
    if not hits and not withheld:
        return Redacted(record)
    left = without_derived(left, texts=bool(fields) or withheld)
    return Redacted(left, frozenset(hits), withheld)


def redact_feedback(record: FeedbackRecord, rules: Rules) -> tuple[FeedbackRecord, frozenset[str]]:
    """Return feedback without what patterns find in its texts, and the rules that hit.

    Texts are the values that are stated in words, and details of tools.
    """
    hits: set[str] = set()
    items = tuple(_item(item, rules.patterns, hits) for item in record.items)
    return (msgspec.structs.replace(record, items=items) if hits else record), frozenset(hits)


def _item(item: FeedbackItem, patterns: Patterns, hits: set[str]) -> FeedbackItem:
    if item.tool is not None:
        return msgspec.structs.replace(item, tool=_event(item.tool, patterns, hits))
    if isinstance(item.value, str):
        value = patterns.text(item.value.encode(errors="surrogatepass"), hits)
        return msgspec.structs.replace(item, value=value.decode(errors="replace"))
    return item


def without_derived(record: CallRecord, *, texts: bool) -> CallRecord:
    """Return a call whose request and reply were redacted, without what else tells of them.

    With `texts`, the copies of texts of both are left out, too: nobody knows which of them hold
    what was taken out.
    """
    record = msgspec.structs.replace(
        record,
        request=None if record.request is None else without_ids(record.request),
        request_raw=None,
        reply=None if record.reply is None else without_ids(record.reply),
        reply_raw=None,
        tokens=Tokens(),
        trainable=False,
        reason=REDACTED,
        tool_events=tuple(msgspec.structs.replace(one, quotes=()) for one in record.tool_events),
        provides=without_prefixes(record.provides),
        needs=without_prefixes(record.needs),
        text_digest=None,
    )
    if not texts:
        return record
    settings = msgspec.json.decode(record.sampling)
    return msgspec.structs.replace(
        record,
        sampling=msgspec.json.encode({name: _plain(value) for name, value in settings.items()}),
        tool_calls=tuple(
            msgspec.structs.replace(call, arguments=WITHHELD.decode()) for call in record.tool_calls
        ),
        tool_events=tuple(msgspec.structs.replace(one, detail=None) for one in record.tool_events),
    )


def without_prefixes(fingerprints: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return those fingerprints that are of ids, and not of words."""
    return tuple(one for one in fingerprints if one[0] not in PREFIXES)


def _without_repeats(record: CallRecord, rules: Rules) -> CallRecord:
    """Return a record whose bodies that have a name twice count as none that can be read.

    A rule for a field would find the last of the two, and the first would be stored.
    """
    if rules.fields and record.request is not None and _repeats(record.request):
        record = msgspec.structs.replace(record, request=None, request_raw=record.request)
    if rules.fields and record.reply is not None and _repeats(record.reply):
        record = msgspec.structs.replace(record, reply=None, reply_raw=record.reply)
    return record


def _repeats(document: bytes) -> bool:
    return repeated_name(read_request(document)) is not None


def _document(body: bytes | None, rules: Rules, hits: set[str], *, of_reply: bool) -> bytes | None:
    if body is None:
        return None
    for rule in rules.fields:
        if rule.of_reply is of_reply:
            replaced = with_field(body, rule.path, rule.instead)
            if replaced is not body:
                hits.add(rule.name)
            body = replaced
    return rules.patterns.document(body, hits)


def _call(call: ToolCall, patterns: Patterns, hits: set[str]) -> ToolCall:
    # As the string of the reply in which it came, so that both say the same.
    arguments = patterns.document(msgspec.json.encode(call.arguments), hits)
    return ToolCall(
        id=call.id,
        name=_text(call.name, patterns, hits),
        arguments=msgspec.json.decode(arguments, type=str),
    )


def _event(event: ToolEvent, patterns: Patterns, hits: set[str]) -> ToolEvent:
    texts = {
        name: _text(text, patterns, hits)
        for name, text in (("name", event.name), ("detail", event.detail))
        if text is not None
    }
    return msgspec.structs.replace(event, **texts)


def _text(text: str, patterns: Patterns, hits: set[str]) -> str:
    redacted = patterns.text(text.encode(errors="surrogatepass"), hits)
    return redacted.decode(errors="replace")


def _plain(value: Any) -> Any:
    """Return a setting if it is no text and holds none; otherwise null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value if isinstance(value, bool | int | float) else None
