"""Define what all wire formats share: requests, replies as their bytes come, and what a format is.

A wire format is a subclass of `WireFormat` and one of `ReplyParser`, and a line in
`proxy.formats.registry`. Nothing outside this package knows any format by its name.
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
    without,
)
from proxy.formats.sampling import SamplingRules
from store.records import ToolCall
from store.values.documents import nests_too_deep


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
    # The upstream's chat template shows system messages that stand between turns.
    keep_system: bool = False


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


NOTHING_SAMPLED: Final = Sampled(None, None, None, choices=1, completion_tokens=None)


class ReplySummary(msgspec.Struct, frozen=True):
    """Hold what of a reply a later call may repeat: its id, and its first choice's content."""

    response_id: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyFacts(msgspec.Struct, frozen=True):
    """State the facts of a reply that are stored, whether it is whole or broke off.

    `reply` is JSON as the client saw it, with a stream's events merged into one object, or None if
    it was not JSON. `too_deep` says that a text of the upstream's became a structure which nests
    too deep to be read. `text` is what the reply's first choice says.
    """

    reply: bytes | None
    response_id: str | None
    finish: str | None
    usage: dict[str, Any] | None
    tool_calls: tuple[ToolCall, ...]
    sampled: Sampled
    too_deep: bool = False
    text: str = ""


class Unread(Exception):
    """Report an event's data that is not a JSON object; it may be one line of several."""


BOM: Final = b"\xef\xbb\xbf"
MARKS: Final = re.compile(rb"(?:%b)+" % BOM)
DATA: Final = b"data:"
EVENT: Final = b"event:"
DONE: Final = b"[DONE]"
LF: Final = 10
CR: Final = 13
_END: Final = rb"(?:\r\n|\n|\r)"
_LINE_END: Final = re.compile(_END)
# Comments without quotes and blank lines, as many as follow each other; or one line.
_RUNS: Final = re.compile(rb'(?:(?::[^"\r\n]*+)?+%b)++|[^\r\n]*+%b' % (_END, _END))
# Lines up to the first blank one, the blank one, and what follows.
_FIRST_BLANK: Final = re.compile(rb"((?:[^\r\n]++%b)*+)(%b?+)(.*+)" % (_END, _END), re.DOTALL)


# Without these and without quotes, lines leave as they come.
_TELLING: Final = (b"data", b"event", BOM)
# In fewer bytes runs are not looked for: nearly all chunks are one event.
SHORT: Final = 1024
# How a comment and a blank line begin.
_QUIET: Final = b":\r\n"


class ReplyParser:
    """Follow one reply: return what the client gets, and gather what is stored of it.

    It is fed a reply's bytes and returns those that the client gets: without what was asked for on
    our behalf, and every other byte as it came. The ingester feeds the same parser the recorded
    bytes, and takes from it what the ledger stores.

    A reply in one piece leaves at its end. Of server-sent events (WHATWG HTML §9.2) each complete
    line leaves at once. An unfinished line waits for its end. A `data:` line that cannot be read by
    itself waits for the rest of its event, for it may be a part of the event's data. From the line
    that ends the reply on, bytes are held back until the record is durable.

    The caller bounds what is held: by `pass_line` what waits, by `forget` what is gathered.
    """

    # Whether a stream's last event has come whole; what follows is not recorded.
    at_end = False
    _end_seen = False
    # How many events could not be read.
    _unread = 0
    _holding = False
    _skip_blank = False
    # The rest of a line passes that was too long to be held.
    _passing = False
    # Approximate memory of what was gathered for `summary`, in bytes.
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
        """Begin before the first byte.

        Args:
            request: the request as it was rewritten.
            served_name: the version's name, which the request went to.
            streamed: the reply is server-sent events.
            status: the HTTP status with which it comes.
            reading: what is stored is gathered, and nothing is passed on.
        """
        self._request = request
        self._served_name = served_name
        self._streamed = streamed
        self._status = status
        self._reading = reading
        # The client's name for the model, to be put back; None if it was not changed.
        self._model = None
        if served_name is not None and request.model not in (None, served_name):
            self._model = msgspec.Raw(msgspec.json.encode(request.model))
        # A whole reply's bytes so far.
        self._pieces: list[bytes] = []
        # An unfinished line.
        self._partial = bytearray()
        # An event whose first line of data could not be read by itself, from that line on.
        self._open = bytearray()
        # What waits for the record, from the reply's end on.
        self._held = bytearray()
        self.begin()
        self._hidden = (*self.added(b""), b"model")

    def begin(self) -> None:
        """Set up what the format keeps of a reply, before the first byte."""

    def whole(self, body: bytes) -> bytes:
        """Return what the client gets of a reply in one piece."""
        return body

    def event(self, data: bytes) -> bytes | None:
        """Return what the client gets of an event's data, or None to drop the event.

        The same object is returned if nothing changes.

        Raises:
            Unread: the data cannot be parsed.
        """
        return data

    def added(self, data: bytes) -> dict[bytes, Replacement]:
        """Return the members, by name, that are taken out of data that cannot be parsed."""
        return {}

    def is_end(self, line: bytes) -> bool:
        """Return whether a line begins a stream's last event; OpenAI's is `data: [DONE]`."""
        return DONE in line and line.startswith(DATA) and line[5:].strip() == DONE

    def summary(self) -> ReplySummary:
        """Return what a later call may repeat of the reply, as far as it has come."""
        raise NotImplementedError

    def facts(self) -> ReplyFacts:
        """Return what the ledger stores of the reply, as far as it has come."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Return whether the reply came to its proper end, and every event could be read."""
        return self._end_seen and not self._unread

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes as they came, and return those that may leave at once."""
        if not self._streamed:
            self._pieces.append(chunk)
            return b""
        leaving: list[bytes] = []
        if self._passing:
            end = _LINE_END.search(chunk)
            at = len(chunk) if end is None else end.end()
            out = self._passed(chunk[:at])
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
    def waiting(self) -> int:
        """Return how many bytes wait: of an unfinished line or event, and from the end on."""
        return len(self._partial) + len(self._open) + len(self._held)

    def pass_line(self) -> bytes:
        """Return what waits as it came; the rest of an unfinished line will leave as it comes.

        Past the reply's end nothing may leave before the record is durable, so the reply counts as
        `at_end` and what waits is left to `release`.
        """
        self._passing = bool(self._partial) and self._partial[-1] != CR
        out = self._passed(bytes(self._open + self._partial))
        self._open.clear()
        self._partial.clear()
        if self._holding:
            self._held += out
            self.at_end = True
            return b""
        return out

    def _passed(self, data: bytes) -> bytes:
        """Return what leaves of a line that is too long to be held."""
        return data

    def forget(self) -> None:
        """Forget what was gathered of a reply that is too long to be stored."""
        self.gathered = 0
        self.begin()

    def finish(self) -> bytes:
        """Take the upstream's end, and return the bytes held back until the record is durable."""
        if not self._streamed:
            self._end_seen = True
            out = self.whole(b"".join(self._pieces))
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
        """Return what was held back, once the record is durable; later bytes leave as they come."""
        held = b"" if self._reading else bytes(self._held)
        self._held.clear()
        self._holding = False
        return held

    def hide(self, data: bytes) -> bytes:
        """Return data that cannot be parsed without what no client may see."""
        if b'"' not in data or not any(name in data for name in self._hidden):
            return data
        members = self.added(data)
        if self._model is not None:
            served = msgspec.json.encode(self._served_name)
            members[b"model"] = Replacement(opens=STRING, instead=bytes(self._model), only=served)
        return without(data, members)

    def _lines(self, chunk: bytes) -> tuple[list[bytes], Callable[[bytes], bytes]]:
        """Return the lines that `chunk` completes, and the method that takes each.

        Lines end in LF, CR or both. A CR that is the last byte so far may be half of a line's end:
        it waits for the next byte. Comments and blank lines may come in one piece for `_run`.
        """
        if self._partial and chunk:
            is_waiting = self._partial[-1] == CR
            self._partial += chunk
            # A line in many pieces is copied once, at its end.
            if not is_waiting and b"\n" not in chunk and b"\r" not in chunk:
                return [], self._line
            chunk = bytes(self._partial)
            self._partial.clear()
        if not chunk.endswith(b"\n"):
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, -1)) + 1
            self._partial += chunk[end:]
            chunk = chunk[:end]
        if b'"' not in chunk and not any(mark in chunk for mark in _TELLING):
            return [chunk] if chunk else [], self._run
        if len(chunk) > SHORT and (b"\n:" in chunk or b"\n\n\n" in chunk or b"\r" in chunk):
            return _RUNS.findall(chunk), self._run
        return chunk.splitlines(keepends=True), self._line

    def _run(self, run: bytes) -> bytes:
        """Return what leaves of one line, or of a run of lines without data that hide nothing.

        Only the first blank line of a run can end an event.
        """
        if run[0] in _QUIET and b'"' not in run and not self._awaits_blank():
            return self._quiet(run)
        match = _FIRST_BLANK.fullmatch(run)
        assert match is not None
        lines, blank, rest = match.groups()
        out = self._line(lines) if lines else b""
        return out + self._line(blank) + self._quiet(rest) if blank else out

    def _awaits_blank(self) -> bool:
        """Return whether a blank line would change anything."""
        return bool(self._open) or self._skip_blank or self._end_seen > self.at_end

    def _quiet(self, run: bytes) -> bytes:
        """Return what leaves of comments and blank lines after which no event is open."""
        return run

    def _line(self, line: bytes) -> bytes:
        """Return what leaves of a line."""
        if self._open:
            if line.strip():
                self._open += line
                return b""
            self.at_end = self._end_seen
            return self._dispatch(line)
        if not line.startswith(DATA):
            return self._other(line)
        data = line[5:].strip()
        try:
            out = self.event(data)
        except Unread:
            self._open += line
            return b""
        if out is None:
            self._skip_blank = True
            return b""
        return line if out is data else line.replace(data, out, 1)

    def _other(self, line: bytes) -> bytes:
        if line == b"\n" or not line.strip():
            self.at_end = self._end_seen
            skip, self._skip_blank = self._skip_blank, False
            return b"" if skip else line
        if line[0] == BOM[0] and (marks := MARKS.match(line)):
            # A stream may begin with a byte order mark, which is no part of the first line.
            return marks[0] + self._line(line[marks.end() :])
        # Lines of other fields carry no data. But a reader that knows fewer kinds of line ends
        # may take a part of one for data.
        return line if line.startswith(EVENT) else self.hide(line)

    def _dispatch(self, blank: bytes) -> bytes:
        """Return an event whose data is on several lines, as it leaves."""
        lines = self._open_lines()
        data = _joined(lines)
        try:
            out = self.event(data)
        except Unread:
            self._unread += 1
            out = self.hide(data)
        lines = [line if _is_data(line) else self.hide(line) for line in lines]
        if out is None:
            return b"".join(line for line in lines if not _is_data(line))
        return _with_data(lines, data, out) + blank

    def _unfinished(self, rest: bytes) -> bytes:
        """Return an event that was cut off: it is passed on without a call of `event`."""
        if marks := MARKS.match(rest):
            return marks[0] + self._unfinished(rest[marks.end() :])
        came = [*self._open_lines(), rest]
        lines = [line if _is_data(line) else self.hide(line) for line in came]
        data = _joined(lines)
        return _with_data(lines, data, self.hide(data))

    def _open_lines(self) -> list[bytes]:
        """Return the lines of the event that could not be read, which ends with them."""
        lines = bytes(self._open).splitlines(keepends=True)
        self._open.clear()
        return lines


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join(_data_of(line) for line in lines if _is_data(line))


def _with_data(lines: list[bytes], data: bytes, out: bytes) -> bytes:
    """Return an event's lines, with `out` in place of their `data` if the two differ."""
    if out == data:
        return b"".join(lines)
    first = next(line for line in lines if _is_data(line))
    end = first[len(first.rstrip(b"\r\n")) :]
    rewritten = [DATA + b" " + part + end for part in out.split(b"\n")]
    return b"".join(rewritten + [line for line in lines if not _is_data(line)])


def _is_data(line: bytes) -> bool:
    """Return whether a line is of the field `data`, which may stand without a colon."""
    return line.startswith(DATA) or line.rstrip(b"\r\n") == b"data"


def _data_of(line: bytes) -> bytes:
    value = line[5:].rstrip(b"\r\n")
    return value[1:] if value.startswith(b" ") else value


class WireFormat(Protocol):
    """Speak one API of clients: know its routes, and read its requests and replies.

    A format is a subclass of this one.
    """

    # The format's name, as the ledger stores it; it never changes.
    name: str
    # The format's name for readers of the reference.
    title: str
    # The path to which calls are posted, from `/v1` on.
    path: str
    # The paths to which requests are posted that are passed on unrecorded; never prefixes.
    forwarded: tuple[str, ...] = ()
    # The request's large fields, without which the ingester can read the reply.
    unread: tuple[str, ...] = ()
    # The form of this API's errors.
    errors: ErrorShape = OPENAI
    # The event that fills a stream's long silence, where this API has one.
    ping: bytes = b""
    # How its requests hold a conversation.
    turns: Turns = Turns()
    # Which of its fields tell how a call was sampled.
    sampling: SamplingRules = SamplingRules()
    # What follows a reply.
    parser: type[ReplyParser] = ReplyParser

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request for the upstream; its bytes are the client's if nothing must change.

        With `want_ids`, the fields that make the server send token ids and log-probabilities are
        added.
        """

    def has_inline_system(self, request: ModelRequest) -> bool:
        """Return whether `rewrite` may have to move system messages from between turns."""
        return False

    def reply(
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
        """Return what follows the reply to a request: `parser`, unless that depends on it."""
        return self.parser
