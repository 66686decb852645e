"""Define what wire formats share: requests, incremental reply parsers, and the format interface.

A wire format consists of a subclass of `WireFormat`, a subclass of `ReplyParser`, and an entry in
`proxy.formats.registry`. Nothing outside this package refers to a format by name.
"""

import re
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from proxy.formats.conversation import Turns
from proxy.formats.errors import OPENAI, ErrorShape
from proxy.formats.raw_json import (
    STRING,
    Object,
    Replacement,
    parse_object,
    readable_value,
    replace_members,
)
from proxy.formats.sampling import SamplingRules
from store.records import ToolCall
from store.values.documents import nests_too_deep


class ModelRequest(msgspec.Struct, frozen=True):
    """Body to send to the upstream, and the fields that the client sent.

    `parsed` holds the client's top-level fields with unparsed values (None if its body cannot be
    read as a JSON object), `fields` the same with parsed values. `injected` names the fields that
    Pawl added to `body`; their effects are removed from the reply.
    """

    body: bytes
    parsed: Object | None = None
    fields: dict[str, Any] = {}
    model: str | None = None
    stream: bool = False
    injected: frozenset[str] = frozenset()
    # The upstream's path, if it differs from the client's.
    path: str | None = None
    # The upstream's chat template keeps system messages between turns.
    keep_system: bool = False


def read_request(body: bytes, *, checked: bool = False) -> ModelRequest:
    """Parse a request as the client sent it.

    A body that is not a JSON object, or nests too deep to be parsed, is kept as it is: the upstream
    reports what is wrong with it.

    Args:
        body: the request's body.
        checked: the body is known not to nest too deep.
    """
    return request_of(body, parse_object(body) if checked or not nests_too_deep(body) else None)


def request_of(body: bytes, parsed: Object | None) -> ModelRequest:
    """Return the request with `body` and the fields in `parsed`; no fields if that is None."""
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
    """Return `request` with `served_name` (if not None) as its model, and the `added` fields."""
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


class SampledTokens(msgspec.Struct, frozen=True):
    """Token ids of a reply, their log-probabilities, and counts to check them against.

    Ids or log-probabilities are None if the server sent none, or if they cannot be used.
    `thoughtless`: the server reported that the reply has no thoughts; a grammar does not constrain
    thoughts.
    """

    prompt_ids: tuple[int, ...] | None
    sampled_ids: tuple[int, ...] | None
    sampled_logprobs: tuple[float, ...] | None
    choices: int
    completion_tokens: int | None
    thoughtless: bool = False


NOTHING_SAMPLED: Final = SampledTokens(None, None, None, choices=1, completion_tokens=None)


class ReplySummary(msgspec.Struct, frozen=True):
    """Parts of a reply that a later call may repeat: its id, and its first choice's content."""

    response_id: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyFacts(msgspec.Struct, frozen=True):
    """Facts to store about a complete or broken-off reply.

    `reply` is JSON as the client saw it, with a stream's events merged into one object, or None if
    it was not JSON. `too_deep`: JSON that the upstream sent as a string, and the client gets as an
    object, nests too deep to be read. `text` is the first choice's text.
    """

    reply: bytes | None
    response_id: str | None
    finish: str | None
    usage: dict[str, Any] | None
    tool_calls: tuple[ToolCall, ...]
    sampled: SampledTokens
    too_deep: bool = False
    text: str = ""


class UnreadableEvent(Exception):
    """Raised for event data that is not a JSON object, perhaps because further lines follow."""


BOM: Final = b"\xef\xbb\xbf"
BOMS: Final = re.compile(rb"(?:%b)+" % BOM)
DATA: Final = b"data:"
EVENT: Final = b"event:"
DONE: Final = b"[DONE]"
LF: Final = 10
CR: Final = 13
_END: Final = rb"(?:\r\n|\n|\r)"
_LINE_END: Final = re.compile(_END)
# A run of blank lines and comments without quotes, or any single line.
_RUNS: Final = re.compile(rb'(?:(?::[^"\r\n]*+)?+%b)++|[^\r\n]*+%b' % (_END, _END))
# Lines before the first blank line, that blank line, and the rest.
_FIRST_BLANK: Final = re.compile(rb"((?:[^\r\n]++%b)*+)(%b?+)(.*+)" % (_END, _END), re.DOTALL)


# Lines that contain none of these, and no quotes, are forwarded unchanged.
_PARSE_MARKERS: Final = (b"data", b"event", BOM)
# Smaller chunks are not searched for runs: nearly all are one event.
SHORT_CHUNK: Final = 1024
# First bytes of comments and blank lines.
_COMMENT_OR_BLANK: Final = b":\r\n"


class ReplyParser:
    """Incremental parser of a reply: returns the client's bytes, and gathers the facts to store.

    The client's bytes are the upstream's without the values that only Pawl requested. The ingester
    feeds the recorded upstream bytes to the same parser, and takes the facts from it.

    A reply in one piece is returned at its end. Of server-sent events (WHATWG HTML §9.2) each
    complete line is returned at once; an unfinished line is buffered. A `data:` line that cannot be
    parsed alone is buffered until its event ends, since an event's data may span lines. From the
    line that ends the reply on, bytes are held back until the record is durable.

    The caller bounds memory: `pass_buffered_line` empties the buffer, `forget` drops the gathered
    data.
    """

    # Whether a stream's last event is complete; later bytes are not recorded.
    at_end = False
    _end_seen = False
    # How many events could not be read.
    _unreadable_events = 0
    _holding = False
    _skip_blank = False
    # Whether the rest of a line that was too long to buffer is passed through.
    _passing = False
    # Approximate memory of the data gathered for `summary`, in bytes.
    gathered = 0

    def __init__(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        streamed: bool,
        status: int | None = None,
        reading: bool = False,
    ) -> None:
        """Start before the reply's first byte.

        Args:
            request: the request, as `WireFormat.rewrite` returned it.
            served_name: the served name of the version that the request went to.
            streamed: the reply is server-sent events.
            status: the reply's HTTP status.
            reading: gather the facts to store, and return no bytes.
        """
        self._request = request
        self._served_name = served_name
        self._streamed = streamed
        self._status = status
        self._reading = reading
        # The client's name for the model, to put back into the reply; None if it was not changed.
        self._model = None
        if served_name is not None and request.model not in (None, served_name):
            self._model = msgspec.Raw(msgspec.json.encode(request.model))
        # A whole reply's bytes so far.
        self._pieces: list[bytes] = []
        # An unfinished line.
        self._partial = bytearray()
        # An event from its first data line on, if that could not be parsed alone.
        self._open = bytearray()
        # Bytes held back until the record is durable, from the reply's end on.
        self._held = bytearray()
        self.begin()
        self._hidden = (*self.added_members(b""), b"model")

    def begin(self) -> None:
        """Initialise or reset the state that a subclass keeps."""

    def client_reply(self, body: bytes) -> bytes:
        """Return the bytes to send to the client for a reply in one piece."""
        return body

    def client_event(self, data: bytes) -> bytes | None:
        """Return the data to send to the client for an event's data, or None to drop the event.

        Return `data` itself if nothing changes.

        Raises:
            UnreadableEvent: the data cannot be parsed.
        """
        return data

    def added_members(self, data: bytes) -> dict[bytes, Replacement]:
        """Return, by name, how to hide members that only Pawl requested, in unparseable `data`."""
        return {}

    def is_end(self, line: bytes) -> bool:
        """Return whether a line begins a stream's last event; OpenAI's is `data: [DONE]`."""
        return DONE in line and line.startswith(DATA) and line[5:].strip() == DONE

    def summary(self) -> ReplySummary:
        """Return the parts of the reply so far that a later call may repeat."""
        raise NotImplementedError

    def facts(self) -> ReplyFacts:
        """Return the facts to store about the reply so far."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Return whether the reply is complete and every event could be read."""
        return self._end_seen and not self._unreadable_events

    def feed(self, chunk: bytes) -> bytes:
        """Process upstream bytes, and return the bytes to send to the client at once."""
        if not self._streamed:
            self._pieces.append(chunk)
            return b""
        leaving: list[bytes] = []
        if self._passing:
            end = _LINE_END.search(chunk)
            at = len(chunk) if end is None else end.end()
            out = self._pass_long_line(chunk[:at])
            self._passing, chunk = end is None, chunk[at:]
            if self._holding:
                self._held += out
            else:
                leaving.append(out)
        lines, take = self._lines(chunk)
        for line in lines:
            if len(line) > 2 and not self._end_seen and self.is_end(line):
                self._end_seen = self._holding = True
                self.at_end = line.startswith(DATA)
            if self._holding:
                self._held += take(line)
            else:
                leaving.append(take(line))
        return b"" if self._reading else b"".join(leaving)

    @property
    def waiting_bytes(self) -> int:
        """Return how many bytes are buffered or held back."""
        return len(self._partial) + len(self._open) + len(self._held)

    def pass_buffered_line(self) -> bytes:
        """Return the buffered bytes unparsed, and pass through the rest of an unfinished line.

        Once the stream's last event has begun, return nothing: the bytes are held back for
        `release`, as the record must be durable first, and `at_end` is set.
        """
        self._passing = bool(self._partial) and self._partial[-1] != CR
        out = self._pass_long_line(bytes(self._open + self._partial))
        self._open.clear()
        self._partial.clear()
        if self._holding:
            self._held += out
            self.at_end = True
            return b""
        return out

    def _pass_long_line(self, data: bytes) -> bytes:
        """Return the bytes to send to the client for part of a line too long to buffer."""
        return data

    def forget(self) -> None:
        """Drop the data gathered about a reply that is too long to be stored."""
        self.gathered = 0
        self.begin()

    def finish(self) -> bytes:
        """Process the upstream's end; return the last bytes, to send once the record is durable."""
        if not self._streamed:
            self._end_seen = True
            out = self.client_reply(b"".join(self._pieces))
            return b"" if self._reading else out
        rest = bytes(self._partial)
        self._partial.clear()
        if rest:
            self._end_seen = self._end_seen or self.is_end(rest)
            self._held += self._unfinished(rest)
        elif self._open:
            self._held += self._dispatch(b"")
        return self.release()

    def release(self) -> bytes:
        """Return the bytes held back, now that the record is durable; hold back no later bytes."""
        held = b"" if self._reading else bytes(self._held)
        self._held.clear()
        self._holding = False
        return held

    def hide_added_members(self, data: bytes) -> bytes:
        """Return `data`, which need not be JSON, as the client gets it.

        Members that only Pawl asked for are removed; the client's name for the model is put back.
        """
        if b'"' not in data or not any(name in data for name in self._hidden):
            return data
        members = self.added_members(data)
        if self._model is not None:
            served = msgspec.json.encode(self._served_name)
            members[b"model"] = Replacement(opens=STRING, instead=bytes(self._model), only=served)
        return replace_members(data, members)

    def _lines(self, chunk: bytes) -> tuple[list[bytes], Callable[[bytes], bytes]]:
        """Return the lines that `chunk` completes, and the method to process each.

        Lines end in LF, CR or both. A trailing CR may be half of a line's end: it is buffered until
        the next byte. Comments and blank lines may be returned as one run, for `_pass_run`.
        """
        if self._partial and chunk:
            ends_in_cr = self._partial[-1] == CR
            self._partial += chunk
            # A line in many pieces is copied once, at its end.
            if not ends_in_cr and b"\n" not in chunk and b"\r" not in chunk:
                return [], self._pass_line
            chunk = bytes(self._partial)
            self._partial.clear()
        if not chunk.endswith(b"\n"):
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, -1)) + 1
            self._partial += chunk[end:]
            chunk = chunk[:end]
        if b'"' not in chunk and not any(mark in chunk for mark in _PARSE_MARKERS):
            return [chunk] if chunk else [], self._pass_run
        if len(chunk) > SHORT_CHUNK and (b"\n:" in chunk or b"\n\n\n" in chunk or b"\r" in chunk):
            return _RUNS.findall(chunk), self._pass_run
        return chunk.splitlines(keepends=True), self._pass_line

    def _pass_run(self, run: bytes) -> bytes:
        """Return the bytes to send to the client for a line, or for lines without data or quotes.

        Only the first blank line of a run can end an event.
        """
        if run[0] in _COMMENT_OR_BLANK and b'"' not in run and not self._awaits_blank():
            return self._pass_comments(run)
        match = _FIRST_BLANK.fullmatch(run)
        assert match is not None
        lines, blank, rest = match.groups()
        out = self._pass_line(lines) if lines else b""
        return out + self._pass_line(blank) + self._pass_comments(rest) if blank else out

    def _awaits_blank(self) -> bool:
        """Return whether the next blank line changes the parser's state."""
        return bool(self._open) or self._skip_blank or self._end_seen > self.at_end

    def _pass_comments(self, run: bytes) -> bytes:
        """Return the bytes to send to the client for comments and blank lines between events."""
        return run

    def _pass_line(self, line: bytes) -> bytes:
        """Return the bytes to send to the client for a line."""
        if self._open:
            if line.strip():
                self._open += line
                return b""
            self.at_end = self._end_seen
            return self._dispatch(line)
        if not line.startswith(DATA):
            return self._pass_other(line)
        data = line[5:].strip()
        try:
            out = self.client_event(data)
        except UnreadableEvent:
            self._open += line
            return b""
        if out is None:
            self._skip_blank = True
            return b""
        return line if out is data else line.replace(data, out, 1)

    def _pass_other(self, line: bytes) -> bytes:
        if line == b"\n" or not line.strip():
            self.at_end = self._end_seen
            skip, self._skip_blank = self._skip_blank, False
            return b"" if skip else line
        if line[0] == BOM[0] and (boms := BOMS.match(line)):
            # A stream may begin with a byte order mark, which is no part of the first line.
            return boms[0] + self._pass_line(line[boms.end() :])
        # Lines of other fields carry no data. But a client that knows fewer kinds of line ends
        # may read a part of such a line as data.
        return line if line.startswith(EVENT) else self.hide_added_members(line)

    def _dispatch(self, blank: bytes) -> bytes:
        """Return the bytes to send to the client for an event with data on several lines."""
        lines = self._open_lines()
        data = _joined_data(lines)
        try:
            out = self.client_event(data)
        except UnreadableEvent:
            self._unreadable_events += 1
            out = self.hide_added_members(data)
        lines = [line if _is_data(line) else self.hide_added_members(line) for line in lines]
        if out is None:
            return b"".join(line for line in lines if not _is_data(line))
        return _with_data(lines, data, out) + blank

    def _unfinished(self, rest: bytes) -> bytes:
        """Return the bytes to send to the client for a cut-off event, not using `client_event`."""
        if boms := BOMS.match(rest):
            return boms[0] + self._unfinished(rest[boms.end() :])
        received = [*self._open_lines(), rest]
        lines = [line if _is_data(line) else self.hide_added_members(line) for line in received]
        data = _joined_data(lines)
        return _with_data(lines, data, self.hide_added_members(data))

    def _open_lines(self) -> list[bytes]:
        """Return the lines of the buffered event, and clear the buffer."""
        lines = bytes(self._open).splitlines(keepends=True)
        self._open.clear()
        return lines


def _joined_data(lines: list[bytes]) -> bytes:
    return b"\n".join(_data_of(line) for line in lines if _is_data(line))


def _with_data(lines: list[bytes], data: bytes, out: bytes) -> bytes:
    """Return an event's lines joined, with `data` replaced by `out` if the two differ."""
    if out == data:
        return b"".join(lines)
    first = next(line for line in lines if _is_data(line))
    end = first[len(first.rstrip(b"\r\n")) :]
    rewritten = [DATA + b" " + part + end for part in out.split(b"\n")]
    return b"".join(rewritten + [line for line in lines if not _is_data(line)])


def _is_data(line: bytes) -> bool:
    """Return whether a line belongs to the field `data`; a bare `data` without colon does, too."""
    return line.startswith(DATA) or line.rstrip(b"\r\n") == b"data"


def _data_of(line: bytes) -> bytes:
    value = line[5:].rstrip(b"\r\n")
    return value[1:] if value.startswith(b" ") else value


class WireFormat(Protocol):
    """An API that clients speak: its routes, requests and replies."""

    # The format's name in the database; it never changes.
    name: str
    # The format's name for readers of the reference.
    title: str
    # The path to which calls are posted, from `/v1` on.
    path: str
    # Exact paths of requests that are forwarded unrecorded.
    forwarded: tuple[str, ...] = ()
    # Large request fields that the ingester skips: they are not needed to read the reply.
    unneeded_fields: tuple[str, ...] = ()
    # The form of this API's errors.
    errors: ErrorShape = OPENAI
    # The event that is sent in long silences of a stream, if the API has one.
    ping: bytes = b""
    turns: Turns = Turns()
    sampling: SamplingRules = SamplingRules()
    parser: type[ReplyParser] = ReplyParser

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request for the upstream; its body is the client's if nothing must change.

        With `want_ids`, add the fields that make the server send token ids and log-probabilities.
        """

    def has_inline_system(self, request: ModelRequest) -> bool:
        """Return whether the request has system messages that `rewrite` moves unless kept."""
        return False

    def reply_parser(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        streamed: bool,
        status: int | None = None,
        reading: bool = False,
    ) -> ReplyParser:
        """Return a parser for the reply to a request that `rewrite` returned.

        Arguments are those of `ReplyParser`.
        """
        parser = self.parser_for(request)
        return parser(request, served_name, streamed=streamed, status=status, reading=reading)

    def parser_for(self, request: ModelRequest) -> type[ReplyParser]:
        """Return the parser class for a request's reply."""
        return self.parser
