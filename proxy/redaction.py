"""Redaction: rules take secrets out of calls and feedback before they are recorded.

A worker applies the rules before anything of a call is on its disk. A stream may split a secret
over its events, so the worker first makes the call's record, as the ingester would later, and
searches that. If no rule matches, it spools the captured call as always. If one does, it spools the
redacted record, without data derived from the texts: token ids spell a text out, and a fingerprint
of words can be checked against a guess. A call that cannot be redacted is recorded without its
content.

The ingester applies the rules too, for what was spooled before they were set
(docs/howto/redact.md).
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from proxy.errors import BadRedaction
from proxy.formats.base import read_request
from proxy.identity.call_memory import PREFIXES
from proxy.ingester.transcribe import (
    CANNOT_BE_READ,
    Entry,
    raised_at,
    record_without_content,
    transcribe,
)
from proxy.metrics import REDACTED as REDACTED_RECORDS
from proxy.metrics import WITHHELD, labelled
from proxy.settings import ProxySettings
from proxy.spool.segments import CapturedCall, Frame, decode_payload, encode_payload
from proxy.strict_bodies import repeated_name
from proxy.trainable import Reason
from store.records import (
    CallRecord,
    FeedbackItem,
    FeedbackRecord,
    GapRecord,
    SpoolRecord,
    Tokens,
    ToolCall,
    ToolEvent,
)
from store.toml_file import TableFile

log = structlog.get_logger()

REDACTED: Final[Reason] = "redacted"
# JSON within a string of JSON is searched down to this depth.
DEEPEST: Final = 4
# Replaces a tool call's arguments that may contain the redacted value.
NO_ARGUMENTS: Final = '"[withheld]"'
# Members that hold token ids, or tokens with their log-probabilities: both spell the text out.
SPELLING_MEMBERS: Final = frozenset(
    {"token_ids", "prompt_token_ids", "logprobs", "prompt_logprobs", "top_logprobs"}
)
# Possessive: a text of any length is passed over once.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class RuleSpec(BaseModel):
    """One table `[[rule]]` of the rules file; it has either a pattern or a field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    pattern: str | None = None
    field: Annotated[str, Field(pattern=r"^(request|reply)(\.[^.]+)+$")] | None = None
    replacement: str = "[redacted]"

    @field_validator("pattern")
    @classmethod
    def _is_usable(cls, pattern: str | None) -> str | None:
        if pattern is not None and _compiled(pattern).search(b"") is not None:
            raise ValueError("it matches the empty text; make it match at least one character")
        return pattern

    @model_validator(mode="after")
    def _has_one_kind(self) -> "RuleSpec":
        if (self.pattern is None) == (self.field is None):
            raise ValueError("write either pattern or field; for both, write two rules")
        return self


FILE: Final = TableFile(
    RuleSpec,
    "rule",
    thing="rule",
    remedies={
        "name": 'name = "cards", of letters, digits and . _ -',
        "pattern": r"pattern = '\b[0-9]{16}\b', a regular expression as RE2 reads it",
        "field": 'field = "request.metadata.user_id", a path from request. or reply. on; * stands '
        "for each member of a list or an object",
        "replacement": 'replacement = "[card]", a text that replaces the matches',
    },
    error=BadRedaction,
    setting="PAWL_REDACTION",
    unset="to store calls as they are",
)


def _compiled(pattern: str) -> Any:
    # Imported here: a proxy without rules does not load the library.
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason: Any = error.args[0] if error.args else error
        message = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(
            f"RE2 cannot read {pattern!r} ({message}). It has no look-around and no "
            "back-references, so that no text can make it slow: write the rule without them"
        ) from error


def parse_rules(text: str, where: str) -> "Rules":
    """Return the rules in `text`; `where` names the file in messages.

    Raises:
        BadRedaction: the text is not TOML, or a value in it is invalid.
    """
    specs = FILE.tables(text, where)
    try:
        return Rules(specs)
    except ValueError as error:
        raise BadRedaction(f"{where}: the patterns are too large together: {error}") from error


class Rules:
    """The rules of a file. Methods add the names of the rules that matched to `hits`."""

    def __init__(self, specs: Sequence[RuleSpec]) -> None:
        """Compile the rules.

        Raises:
            ValueError: the patterns are too large for RE2 together.
        """
        self.fields = [spec for spec in specs if spec.field is not None]
        patterns = [(spec, spec.pattern) for spec in specs if spec.pattern is not None]
        self._patterns = [
            (spec.name, _compiled(pattern), spec.replacement.encode(errors="replace"))
            for spec, pattern in patterns
        ]
        # One search finds out whether any pattern matches.
        self._any_of = _compiled("|".join(f"(?:{pattern})" for _, pattern in patterns) or "x")

    def redact_bytes(self, text: bytes, hits: set[str]) -> bytes:
        """Return a UTF-8 text with each pattern's matches replaced, in the order of the rules."""
        if not self._patterns or self._any_of.search(text) is None:
            return text
        for name, finder, replacement in self._patterns:
            pieces, end = [], 0
            for match in finder.finditer(text):
                pieces += [text[end : match.start()], replacement]
                end = match.end()
            if pieces:
                hits.add(name)
                text = b"".join([*pieces, text[end:]])
        return text

    def redact_text(self, text: str, hits: set[str]) -> str:
        """Return a text with each pattern's matches replaced."""
        return self.redact_bytes(text.encode(errors="surrogatepass"), hits).decode(errors="replace")

    def redact_document(self, document: bytes, hits: set[str], depth: int = 0) -> bytes:
        """Return a JSON document with the matches replaced in its strings and member names.

        All other bytes stay as they are, also numbers of any size. JSON within a string, such as a
        tool call's arguments, is searched like a document, down to depth `DEEPEST`;
        deeper JSON is searched as plain text.
        """
        if not self._patterns:
            return document

        def redacted(match: "re.Match[bytes]") -> bytes:
            literal = match.group()
            text = inner = _decoded(literal)
            if depth < DEEPEST and text.lstrip().startswith((b"{", b"[")):
                inner = self.redact_document(text, hits, depth + 1)
            replaced = self.redact_bytes(inner, hits)
            return literal if replaced == text else _encoded(replaced)

        return _STRING.sub(redacted, document)

    def redact_body(self, body: bytes, side: str, hits: set[str]) -> bytes:
        """Return the body of `side` (`request` or `reply`) with all rules applied."""
        for rule in self.fields:
            of_side, *path = str(rule.field).split(".")
            if of_side == side:
                replaced = replace_field(body, path, msgspec.json.encode(rule.replacement))
                if replaced is not body:
                    hits.add(rule.name)
                body = replaced
        return self.redact_document(body, hits)


def _decoded(literal: bytes) -> bytes:
    """Return the text of a JSON string, in UTF-8; a lone surrogate is kept as three bytes."""
    if b"\\" in literal:
        # Fails if the bytes between two quotes are no JSON string: they are searched undecoded.
        with suppress(ValueError):
            return str(json.loads(literal, strict=False)).encode(errors="surrogatepass")
    return literal[1:-1]


def _encoded(text: bytes) -> bytes:
    """Return a text as a JSON string; bytes that are not UTF-8 become U+FFFD."""
    try:
        decoded = text.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        decoded = text.decode(errors="replace")
    return json.dumps(decoded).encode()


def replace_field(value: bytes, path: Sequence[str], replacement: bytes) -> bytes:
    """Return a JSON value with the values at `path` replaced by the JSON `replacement`.

    A part of the path is a member's name, an item's index, or `*` for every member or item. If
    there is no value at the path, or only null, `value` itself is returned.
    """
    if not path:
        return value if value.strip() in (b"null", replacement) else replacement
    parts = _parts(value)
    changed = {
        name: replace_field(part, path[1:], replacement) if path[0] in ("*", name) else part
        for name, part in parts.items()
    }
    return value if changed == parts else _joined(value, changed)


def without_ids(value: bytes) -> bytes:
    """Return a JSON value without token ids and log-probabilities of tokens, at any depth."""
    if value.lstrip()[:1] not in (b"{", b"[") or b"{" not in value:
        return value
    kept = {}
    for name, part in _parts(value).items():
        # A completion's prompt may be token ids. A request's `logprobs: true` spells nothing out.
        is_spelling = name in SPELLING_MEMBERS or (name == "prompt" and b'"' not in part)
        if not is_spelling or part.lstrip()[:1] not in (b"{", b"["):
            kept[name] = without_ids(part)
    return _joined(value, kept)


def _parts(value: bytes) -> dict[str, bytes]:
    """Return a JSON object's members by name, or a list's items by index; {} for other values."""
    opening, decode = value.lstrip()[:1], msgspec.json.decode
    if opening == b"{":
        return {name: bytes(raw) for name, raw in decode(value, type=dict[str, Raw]).items()}
    if opening == b"[":
        return {str(at): bytes(raw) for at, raw in enumerate(decode(value, type=list[Raw]))}
    return {}


def _joined(value: bytes, parts: Mapping[str, bytes]) -> bytes:
    raw = {name: Raw(part) for name, part in parts.items()}
    return msgspec.json.encode(raw if value.lstrip()[:1] == b"{" else list(raw.values()))


class RedactedCall(NamedTuple):
    """A call's record as it may be stored, and the names of the rules that matched.

    `withheld`: a body was left out because rules cannot be applied to it.
    """

    record: CallRecord
    matched: frozenset[str] = frozenset()
    withheld: bool = False


def redact_call(record: CallRecord, rules: Rules) -> RedactedCall:
    """Return a call with the rules applied; its record is `record` itself if none matches.

    Raises:
        Exception: the call cannot be redacted, and must not be stored as it is.
    """
    hits: set[str] = set()
    bodies: dict[str, bytes | None] = {}
    withheld = bool(record.request_raw or record.reply_raw)
    for side in ("request", "reply"):
        body = getattr(record, side)
        if body is not None and rules.fields and repeated_name(read_request(body)) is not None:
            # A field's rule would replace only the last of two members with the same name.
            body, withheld = None, True
        bodies[side] = body and rules.redact_body(body, side, hits)
    drop_texts = withheld or not hits.isdisjoint(field.name for field in rules.fields)
    redacted = replace(
        record,
        **bodies,
        sampling=rules.redact_document(record.sampling, hits),
        tool_calls=tuple(_redact_tool_call(call, rules, hits) for call in record.tool_calls),
        tool_events=tuple(_redact_tool_event(event, rules, hits) for event in record.tool_events),
    )
    if not hits and not withheld:
        return RedactedCall(record)
    stripped = _without_derived(redacted, drop_texts=drop_texts)
    return RedactedCall(stripped, frozenset(hits), withheld)


def without_content(record: CallRecord) -> CallRecord:
    """Return a call's record without request, reply, and the values derived from them."""
    bare = replace(record, request=None, reply=None, tool_calls=())
    return _without_derived(bare, drop_texts=True)


def _redact_item(item: FeedbackItem, rules: Rules, hits: set[str]) -> FeedbackItem:
    if item.tool is not None:
        return replace(item, tool=_redact_tool_event(item.tool, rules, hits))
    value = rules.redact_text(item.value, hits) if isinstance(item.value, str) else item.value
    text = item.correction
    # Drop it whole: training must not teach the replacement.
    correction = text if text is None or rules.redact_text(text, hits) == text else None
    return replace(item, value=value, correction=correction)


def _redact_tool_call(call: ToolCall, rules: Rules, hits: set[str]) -> ToolCall:
    # Encoded as in the reply, so that both are redacted alike.
    arguments = rules.redact_document(msgspec.json.encode(call.arguments), hits)
    name = rules.redact_text(call.name, hits)
    return ToolCall(id=call.id, name=name, arguments=msgspec.json.decode(arguments, type=str))


def _redact_tool_event(event: ToolEvent, rules: Rules, hits: set[str]) -> ToolEvent:
    name, detail = (text and rules.redact_text(text, hits) for text in (event.name, event.detail))
    return replace(event, name=name, detail=detail)


def _without_derived(record: CallRecord, *, drop_texts: bool) -> CallRecord:
    """Return a redacted call without token ids, log-probabilities, and digests of its texts.

    `drop_texts` removes copies of texts outside request and reply, too: any may have the secret.
    """
    events = record.tool_events
    record = replace(
        record,
        request=None if record.request is None else without_ids(record.request),
        request_raw=None,
        reply=None if record.reply is None else without_ids(record.reply),
        reply_raw=None,
        tokens=Tokens(),
        trainable=False,
        reason=REDACTED,
        tool_events=tuple(replace(event, quotes=()) for event in events),
        # Fingerprints of ids stay, those of words go.
        provides=tuple(digest for digest in record.provides if digest[0] not in PREFIXES),
        needs=tuple(digest for digest in record.needs if digest[0] not in PREFIXES),
        text_digest=None,
    )
    if not drop_texts:
        return record
    calls, events = record.tool_calls, record.tool_events
    return replace(
        record,
        sampling=msgspec.json.encode(_without_texts(msgspec.json.decode(record.sampling))),
        tool_calls=tuple(replace(call, arguments=NO_ARGUMENTS) for call in calls),
        tool_events=tuple(replace(event, detail=None) for event in events),
    )


def _without_texts(value: Any) -> Any:
    """Return sampling settings with null in place of each text and each list."""
    if isinstance(value, dict):
        return {name: _without_texts(member) for name, member in value.items()}
    return value if isinstance(value, bool | int | float) else None


class Redactor:
    """Apply the rules to records before they are written to disk, database or a dead letter."""

    def __init__(self, rules: Rules, settings: ProxySettings) -> None:
        self._rules = rules
        self._readers = settings.tool_results
        self._most_reply = settings.max_reply_mb * 2**20
        # Its thread starts with the first call: the ingester needs none.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pawl-redaction")

    async def redact_captured(self, captured: CapturedCall) -> Frame:
        """Return the frame to spool for a call: `captured` itself if no rule matches.

        The rules are applied in a thread. If that fails, the frame has no content.
        """
        run = asyncio.get_running_loop().run_in_executor
        try:
            redacted = await run(self._executor, self._redact, captured)
        except Exception as error:
            _log_failure(UUID(bytes=captured.id), error)
            return without_content(record_without_content(captured))
        _count_redacted(redacted.matched, withheld=redacted.withheld)
        return redacted.record if redacted.matched or redacted.withheld else captured

    def _redact(self, captured: CapturedCall) -> RedactedCall:
        record = transcribe(captured, self._readers, self._most_reply)
        redacted = redact_call(record, self._rules)
        if redacted.record is not record:
            # Fails here if no frame can hold the record (a lone surrogate): see `redact_captured`.
            encode_payload(redacted.record)
        return redacted

    def redact_record(self, record: SpoolRecord) -> SpoolRecord:
        """Return a record that the ingester may store: without content if redaction fails."""
        if isinstance(record, FeedbackRecord):
            return self.redact_feedback(record)
        # A call that a worker redacted is not redacted again: a replacement may match a pattern.
        if not isinstance(record, CallRecord) or record.reason == REDACTED:
            return record
        try:
            redacted = redact_call(record, self._rules)
        except Exception as error:
            _log_failure(record.id, error)
            return without_content(record)
        _count_redacted(redacted.matched, withheld=redacted.withheld)
        return redacted.record

    def redact_feedback(self, record: FeedbackRecord) -> FeedbackRecord:
        """Return feedback with matches replaced in labels and in tools' names and details.

        A correction with a match is left out.
        """
        hits: set[str] = set()
        items = tuple(_redact_item(item, self._rules, hits) for item in record.items)
        _count_redacted(hits)
        return replace(record, items=items) if hits else record

    def redact_letter(self, entry: Entry) -> tuple[bytes, str]:
        """Return a dead letter's bytes and reason; of a record that is unreadable, no content."""
        # The error's text may quote an unreadable record; its class and place in the code do not.
        is_unread = entry.reason.startswith(CANNOT_BE_READ)
        reason = ": ".join(entry.reason.split(": ")[:2]) if is_unread else entry.reason
        if isinstance(entry.record, CallRecord | FeedbackRecord | GapRecord):
            return encode_payload(entry.record), reason
        try:
            frame = decode_payload(entry.piece.data)
            if isinstance(frame, CapturedCall):
                frame = record_without_content(frame)
            if isinstance(frame, CallRecord):
                frame = without_content(frame)
            elif isinstance(frame, FeedbackRecord):
                frame = self.redact_feedback(frame)
            return encode_payload(frame), reason
        except Exception:
            # Damaged bytes may hold anything.
            return b"", reason


def open_redactor(settings: ProxySettings) -> Redactor | None:
    """Return the redactor for the settings' rules, or None if they name none.

    Raises:
        BadRedaction: the file of rules cannot be read or is invalid.
    """
    path = settings.redaction
    return None if path is None else Redactor(parse_rules(FILE.text_of(path), str(path)), settings)


def _count_redacted(rules: Iterable[str], *, withheld: bool = False) -> None:
    for name in rules:
        labelled(REDACTED_RECORDS, name).inc()
    if withheld:
        labelled(WITHHELD, "not_json").inc()


def _log_failure(call: UUID, error: Exception) -> None:
    labelled(WITHHELD, "unreadable").inc()
    # Neither the error's text nor its values: they may quote the call.
    log.error(
        "call_withheld", call=str(call), error=f"{type(error).__name__} at {raised_at(error)}"
    )
