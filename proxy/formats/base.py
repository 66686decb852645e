"""Define what a wire format offers, and the values that pass through it (pure).

Adding a format is a module with a `WireFormat`, and a line in `proxy.formats.registry`. Nothing
outside this package knows any format by its name.
"""

from typing import Any, Protocol

import msgspec

from proxy.formats.conversation import Turns
from proxy.formats.errors import ErrorShape
from proxy.formats.raw_json import Object, parse_object, readable_value
from proxy.formats.sampling import SamplingRules
from store.records import ToolCall
from store.values.json_limits import nests_too_deep


class ModelRequest(msgspec.Struct, frozen=True):
    """Hold a request as it goes to the upstream, and what must be removed again from its reply.

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


class Sampled(msgspec.Struct, frozen=True):
    """Hold one reply's token ids, their log-probabilities, and the counts to check them against.

    Log-probabilities that the server gives for some of the ids only are None. `thoughtless` says
    whether the server told that no part of the reply is a thought, which no grammar holds.
    """

    prompt_ids: tuple[int, ...] | None
    sampled_ids: tuple[int, ...] | None
    sampled_logprobs: tuple[float, ...] | None
    choices: int
    completion_tokens: int | None
    thoughtless: bool = False


NOTHING_SAMPLED = Sampled(
    prompt_ids=None, sampled_ids=None, sampled_logprobs=None, choices=1, completion_tokens=None
)


class ReplySummary(msgspec.Struct, frozen=True):
    """Hold what of a reply a later call may repeat: its id, and its first choice's content."""

    response_id: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyFacts(msgspec.Struct, frozen=True):
    """State the facts of a reply that are stored, whether it is whole or broke off.

    `reply` is JSON as the client saw it, with a stream's events merged into one object, or None if
    it was not JSON. `whole` says whether the reply came to its proper end. `too_deep` says that a
    text of the upstream's became a structure which nests too deep to be read. `text` is what
    the reply's first choice says.
    """

    reply: bytes | None
    response_id: str | None
    finish: str | None
    usage: dict[str, Any] | None
    tool_calls: tuple[ToolCall, ...]
    sampled: Sampled
    whole: bool
    too_deep: bool = False
    text: str = ""


class Transcript(Protocol):
    """Follow one reply in a worker: pass on what the client is to see, and note what it says."""

    @property
    def ended(self) -> bool:
        """Return whether the reply came to its proper end."""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes as they came, and return those that may leave at once."""

    def finish(self) -> bytes:
        """Take the upstream's end, and return the bytes held back until the record is durable."""

    def summary(self) -> ReplySummary:
        """Return what a later call may repeat of the reply."""


class StreamTranscript(Transcript, Protocol):
    """Follow a reply of server-sent events, whose sender may keep it open after the last event."""

    @property
    def at_end(self) -> bool:
        """Return whether the reply's last event has come whole; what follows is not recorded."""

    def release(self) -> bytes:
        """Return what was held back, once the record is durable; later bytes leave as they come."""


class ReplyReader(Transcript, Protocol):
    """Follow a recorded reply in the ingester, as the worker did, for all that is stored of it."""

    def read(self, raw: bytes) -> None:
        """Take all bytes that the upstream sent, for their facts only."""

    def facts(self) -> ReplyFacts:
        """Return the reply's facts, whole or not."""


class WireFormat(Protocol):
    """Speak one API of clients: know its routes, and read its requests and replies."""

    @property
    def name(self) -> str:
        """Return the format's name, as the ledger stores it."""

    @property
    def title(self) -> str:
        """Return the format's name for readers of the reference."""

    @property
    def path(self) -> str:
        """Return the path to which calls are posted, from `/v1` on."""

    @property
    def forwarded(self) -> tuple[str, ...]:
        """Return the paths to which requests are posted that are passed on unrecorded."""

    @property
    def errors(self) -> ErrorShape:
        """Return the form of this API's errors."""

    @property
    def turns(self) -> Turns:
        """Return how its requests hold a conversation."""

    @property
    def sampling(self) -> SamplingRules:
        """Return which of its fields tell how a call was sampled."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the request's large fields, without which the ingester can read the reply."""

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request for the upstream; its bytes are the client's if nothing must change.

        With `want_ids`, the fields that make the server send token ids and log-probabilities are
        added.
        """

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Return a transcript for a reply in one piece, which comes with this HTTP `status`."""

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Return a transcript for a reply of server-sent events."""

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Return a reader for a recorded reply in one piece, which came with this HTTP `status`."""

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Return a reader for a recorded reply of server-sent events."""


def read_request(body: bytes, *, checked: bool = False) -> ModelRequest:
    """Parse a request as the client sent it.

    A body that is not a JSON object is kept as it is: the upstream says what is wrong with it. So
    is one that nests too deep to be parsed.

    Args:
        body: the request's body.
        checked: the body is known not to nest too deep.
    """
    return request_of(body, parse_object(body) if checked or not nests_too_deep(body) else None)


def request_of(body: bytes, parsed: Object | None) -> ModelRequest:
    """Return the request with this body, of which `parsed` holds the fields that are to be read."""
    if parsed is None:
        return ModelRequest(body=body)
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
