"""Define what a wire format's room offers, and the values that pass through it (pure).

Adding a format is a room that keeps `WireFormat`, and a line in `proxy.formats.registry`. Nothing
outside this package knows any format by its name.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from proxy.formats.conversation import Conversation
from store.records import Record, ToolCall

# The top level of a JSON object; its values stay bytes until somebody needs them.
Object = dict[str, msgspec.Raw]


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


class ToolResult(Record, frozen=True, kw_only=True):
    """Give the result of one tool call; `is_error` is None if the client did not state it.

    `texts` are the texts among the tool call's arguments, as far as the request shows it.
    """

    tool_id: str
    name: str | None
    text: str
    is_error: bool | None = None
    texts: tuple[str, ...] = ()


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
    """Follow one recorded reply in the keeper, as the worker did, for all that is stored of it."""

    def read(self, raw: bytes) -> None:
        """Take all bytes that the upstream sent, for their facts only."""

    def facts(self) -> ReplyFacts:
        """Return the reply's facts, whole or not."""


class ErrorShape(Protocol):
    """State an error in the form of an API."""

    @property
    def api(self) -> str:
        """Return whose form it is, as the reference names it: `OpenAI` or `Anthropic`."""

    def body(
        self,
        message: str,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        *,
        status: int | None = None,
    ) -> bytes:
        """Return the body of an error reply, to be sent with `status`."""

    def event(
        self,
        message: str,
        kind: str = "server_error",
        *,
        sequence_number: int = 0,
        status: int | None = None,
    ) -> bytes:
        """Return the event that ends a stream with an error.

        `sequence_number` counts a response's events; no other API has one. `status` is what the
        error would have had before the stream began, where that is known.
        """


class Turns(Protocol):
    """Read the conversation that a format's requests hold; `proxy.formats.turns` has most of it."""

    @property
    def states_errors(self) -> bool:
        """Return whether a tool result without a mark of failure states that the tool succeeded."""

    @property
    def continued_by_id(self) -> bool:
        """Return whether a later request may name this reply by its id, and go on from it."""

    def continues(self, fields: Mapping[str, Any]) -> str | None:
        """Return the id of the reply that a request goes on from, if it names one."""

    def shows_all(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a request shows its conversation from the beginning."""

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation that a request shows."""

    def said_by_users(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return what users say in a request, message by message, each a content unparsed.

        Nothing if no user speaks, or if the format does not tell users from instructions.

        Raises:
            MsgspecError, UnicodeDecodeError, RecursionError: a part of it cannot be read; also
                while the messages are iterated over.
        """

    def only_text(self, parsed: Object) -> bool:
        """Return whether all that a request shows and asks for is text: no image, sound or file."""

    def results(self, parsed: Object | None) -> list[ToolResult]:
        """Return the tool results that answer the assistant's last turn, one for each tool call."""


class SamplingRules(Protocol):
    """Tell the request fields of a format that say how it was sampled from those that do not.

    What a model server understands in every format is known to `proxy.keeper.sampling`.
    """

    @property
    def settings(self) -> frozenset[str]:
        """Return the format's own names of settings, which are recorded."""

    @property
    def objects(self) -> tuple[str, ...]:
        """Return those of the settings that must be objects to be understood."""

    @property
    def harmless(self) -> frozenset[str]:
        """Return the fields that change no distribution; any other makes a call untrainable."""

    def reshapes(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a setting of this format's changes the distribution."""

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a setting of this format's lets some tokens never be sampled."""

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar that a request's fields hold its reply to, as it is recorded.

        None if there is none, or if it is not certain what a server makes of the fields. Only
        asked where something may hold the reply. `tag` is the syntax that the server holds calls
        of tools to (`proxy.formats.tool_parsers`), if that is known.
        """


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
        """Return the request's large fields, without which the keeper can read the reply."""

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
