"""The interface of a dialect, and functions that all dialects share."""

from typing import Any, Final, Protocol

import msgspec

from proxy.calls.trainable import Sampled
from store.records import ToolCall
from store.values.json_limits import nests_too_deep

Object = dict[str, msgspec.Raw]
# Errors of a parser for bytes that are not JSON, not UTF-8, or nested too deep.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_objects: Final = msgspec.json.Decoder(Object)


class ModelRequest(msgspec.Struct, frozen=True):
    """A request as it goes to the upstream, and what must be removed again from its reply.

    `parsed` is the body's top level with values unparsed (None if it is not a JSON object);
    `fields` is the same with values parsed, as the client sent them. `injected` names the fields
    that we added.
    """

    body: bytes
    parsed: Object | None = None
    fields: dict[str, Any] = {}
    model: str | None = None
    stream: bool = False
    injected: frozenset[str] = frozenset()
    # The upstream's path, where it differs from the one that the client asked for.
    path: str | None = None


class ReplySummary(msgspec.Struct, frozen=True):
    """The parts of a reply that a later call may repeat: its id, and its first choice's content."""

    response_id: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyFacts(msgspec.Struct, frozen=True):
    """The facts of a reply that are stored, whether it is whole or broke off.

    `reply` is JSON as the client saw it, with a stream's events merged into one object, or None if
    it was not JSON. `whole` says whether the reply came to its proper end.
    """

    reply: bytes | None
    response_id: str | None
    finish: str | None
    usage: dict[str, Any] | None
    tool_calls: tuple[ToolCall, ...]
    sampled: Sampled
    whole: bool


class Transcript(Protocol):
    """Follows one reply: passes on what the client is to see, and gathers what it says.

    A worker follows a reply as far as serving needs. The keeper later feeds the same bytes to a
    transcript made for `reading`, which also gives the facts.
    """

    @property
    def ended(self) -> bool:
        """Return whether the reply came to its proper end."""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes as they came, and return those that may leave at once."""

    def finish(self) -> bytes:
        """Take the upstream's end, and return the bytes held back until the record is durable."""

    def summary(self) -> ReplySummary:
        """Return what a later call may repeat of the reply."""

    def facts(self) -> ReplyFacts:
        """Return the reply's facts, whole or not; only on a transcript made for `reading`."""


class StreamTranscript(Transcript, Protocol):
    """Follows a reply of server-sent events, whose sender may keep it open after the last event."""

    @property
    def at_end(self) -> bool:
        """Return whether the reply's last event has come whole; what follows is not recorded."""

    def release(self) -> bytes:
        """Return what was held back, once the record is durable; later bytes leave as they come."""


class Dialect(Protocol):
    """One wire format: rewrites a request and follows its reply."""

    @property
    def name(self) -> str:
        """Return the format's name, as the ledger stores it."""

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request for the upstream; its bytes are the client's if nothing must change.

        With `want_ids`, the fields that make the server send token ids and log-probabilities are
        added.
        """

    def whole(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        reading: bool = False,
        status: int | None = None,
    ) -> Transcript:
        """Return a transcript for a reply in one piece, which comes with this HTTP `status`."""

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> StreamTranscript:
        """Return a transcript for a reply of server-sent events."""


def read_request(
    body: bytes, *, without: tuple[str, ...] = (), checked: bool = False
) -> ModelRequest:
    """Parse a request as the client sent it.

    A body that is not a JSON object is kept as it is: the upstream says what is wrong with it. So
    is one that nests too deep to be parsed.

    Args:
        body: the request's body.
        without: names of fields to leave out.
        checked: the body is known not to nest too deep.
    """
    parsed = parse_object(body) if checked or not nests_too_deep(body) else None
    if parsed is None:
        return ModelRequest(body=body)
    for name in without:
        parsed.pop(name, None)
    fields = {name: readable_value(raw) for name, raw in parsed.items()}
    model = fields.get("model")
    return ModelRequest(
        body=body,
        parsed=parsed,
        fields=fields,
        model=model if isinstance(model, str) else None,
        stream=fields.get("stream") is True,
    )


def with_changes(request: ModelRequest, served_name: str | None, added: Object) -> ModelRequest:
    """Return `request` under the version's name and with `added` fields, all else byte for byte."""
    if request.parsed is None:
        return request
    changes: Object = {}
    if served_name is not None and served_name != request.model:
        changes["model"] = msgspec.Raw(msgspec.json.encode(served_name))
    changes |= added
    if not changes:
        return request
    body = msgspec.json.encode(request.parsed | changes)
    return msgspec.structs.replace(request, body=body, injected=frozenset(added))


def own_name(request: ModelRequest, served_name: str | None) -> msgspec.Raw | None:
    """Return the model's name to put back into a reply, or None if it was not changed."""
    if served_name is None or request.model is None or served_name == request.model:
        return None
    return msgspec.Raw(msgspec.json.encode(request.model))


def parse_object(body: bytes) -> Object | None:
    """Return a JSON object's top level with values unparsed, or None if it cannot be read as one.

    Keys keep their order and values their exact bytes, so that what is not touched leaves as it
    came.
    """
    try:
        if not body.isascii():
            body.decode()
        return _objects.decode(body)
    except UNREADABLE:
        return None


def value_of(raw: msgspec.Raw | None) -> Any:
    """Return the parsed value of a field, or None if the field is absent."""
    return None if raw is None else msgspec.json.decode(raw)


def readable_value(raw: msgspec.Raw) -> Any:
    """Return the parsed value, or its JSON text if Python cannot represent it (such as 1e400)."""
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return bytes(raw).decode()


def decoded_object(payload: bytes | msgspec.Raw) -> dict[str, Any] | None:
    """Return a JSON object with all its values, or None if Python cannot represent or nest it.

    `parse_object` accepts more: it leaves values unparsed, so that a lone surrogate or 1e400 passes
    through. Reading for the ledger must not fail a reply that was passed on.
    """
    if nests_too_deep(bytes(payload)):
        # The object is walked and encoded again later, which is recursive too.
        return None
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        return None


NULL = msgspec.Raw(b"null")
