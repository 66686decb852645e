"""What every dialect gives the relay."""

from typing import Any, Final, Protocol

import msgspec

from proxy.trainable import Sampled
from store.json_limits import nests_too_deep
from store.records import ToolCall

Object = dict[str, msgspec.Raw]
# What a parser raises for bytes that it cannot read: not JSON, not UTF-8, or too deep for it.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_objects: Final = msgspec.json.Decoder(Object)


class ModelRequest(msgspec.Struct, frozen=True):
    """A request as it goes to the upstream, and what must be undone in its reply.

    `parsed` is its top level with values unparsed (None: it is no JSON object), `fields`
    the same parsed, as the client sent them; `injected` names what the client did not ask for.
    """

    body: bytes
    parsed: Object | None = None
    fields: dict[str, Any] = {}
    model: str | None = None
    stream: bool = False
    injected: frozenset[str] = frozenset()
    # Where it is sent, if not to the path that the client asked.
    path: str | None = None


class Gist(msgspec.Struct, frozen=True):
    """What a later call may repeat of a reply: its first choice's text and tool calls, its id."""

    response_id: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyFacts(msgspec.Struct, frozen=True):
    """What a finished (or torn) reply said.

    `reply` is JSON as the client saw it, streams put together into one object; None where
    it was no JSON. `whole` says whether it came to its proper end.
    """

    reply: bytes | None
    response_id: str | None
    finish: str | None
    usage: dict[str, Any] | None
    tool_calls: tuple[ToolCall, ...]
    sampled: Sampled
    whole: bool


class Transcript(Protocol):
    """Follows one reply: passes on what the client is to see, and knows what was said.

    Fed with the same bytes once more, one that was made for `reading` gives the facts: the
    worker needs only what serving needs, the keeper reads the rest later.
    """

    @property
    def ended(self) -> bool:
        """Whether the reply came to its proper end."""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes as they came; return those that may leave at once."""

    def finish(self) -> bytes:
        """The upstream has ended: return the bytes held back until the record is durable."""

    def gist(self) -> Gist:
        """What a later call may repeat of it."""

    def facts(self) -> ReplyFacts:
        """All that was said, whole or not; made for `reading` only."""


class StreamTranscript(Transcript, Protocol):
    """Follows a reply of server-sent events, whose sender may linger after the last of them."""

    @property
    def at_end(self) -> bool:
        """Whether the event that ends the reply is there, whole: what follows is not recorded."""

    def release(self) -> bytes:
        """The record is durable: return what was held back for it; the rest leaves as it comes."""


class Dialect(Protocol):
    """One wire format: how a request is rewritten and its reply followed."""

    @property
    def name(self) -> str:
        """As the ledger has it."""

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """The request for the upstream; the client's own bytes where nothing must change."""

    def whole(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        reading: bool = False,
        status: int | None = None,
    ) -> Transcript:
        """Follows a reply that comes in one piece, with this HTTP `status`."""

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> StreamTranscript:
        """Follows a reply of server-sent events."""


def read_request(
    body: bytes, *, without: tuple[str, ...] = (), checked: bool = False
) -> ModelRequest:
    """A request as the client sent it; fields `without` which it can be read are left out.

    A body that is no JSON object is kept as it is: the upstream says what is wrong with it. So
    is one that nests too deep to be parsed; `checked` says that it is known not to.
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
    """`request` under the version's name and with `added` fields, all else byte for byte."""
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
    """The model's name to put back into a reply; None where it was not changed."""
    if served_name is None or request.model is None or served_name == request.model:
        return None
    return msgspec.Raw(msgspec.json.encode(request.model))


def parse_object(body: bytes) -> Object | None:
    """A JSON object's top level, its values unparsed; None if it is not one that can be read.

    Keys keep their order and values their exact bytes, so that what is not touched comes
    out as it went in.
    """
    try:
        if not body.isascii():
            body.decode()
        return _objects.decode(body)
    except UNREADABLE:
        return None


def value_of(raw: msgspec.Raw | None) -> Any:
    """The parsed value of a field; None where it is absent."""
    return None if raw is None else msgspec.json.decode(raw)


def readable_value(raw: msgspec.Raw) -> Any:
    """The parsed value, or its text where it is none that Python holds (such as 1e400)."""
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return bytes(raw).decode()


def decoded_object(payload: bytes | msgspec.Raw) -> dict[str, Any] | None:
    """A JSON object with all its values; None where one is none that Python holds, or too deep.

    `parse_object` takes more: it leaves values alone, so that a lone surrogate or 1e400
    passes through it. What is only read for the ledger must not fail where that did not.
    """
    if nests_too_deep(bytes(payload)):
        # What is built must be walked over and encoded again: that is recursive too.
        return None
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        return None


NULL = msgspec.Raw(b"null")
