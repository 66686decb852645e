"""Speak chat completions and text completions, which both answer in `choices` (pure)."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from proxy.formats.base import (
    ModelRequest,
    ReplyFacts,
    ReplyReader,
    ReplySummary,
    Sampled,
    StreamTranscript,
    Transcript,
    own_name,
    with_changes,
)
from proxy.formats.conversation import Turns
from proxy.formats.errors import OPENAI, ErrorShape
from proxy.formats.raw_json import (
    NULL,
    ODD_SHAPE,
    Member,
    Object,
    decoded_object,
    parse_object,
    readable_value,
    string_or_none,
    value_of,
    without,
)
from proxy.formats.sampling import SamplingRules
from proxy.formats.sse import EventStream, Unread, is_done
from store.records import ToolCall
from store.values.json_limits import nests_too_deep


class ChoicesFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Speak chat completions or text completions.

    `wanted` are the fields that make vLLM send ids and log-probabilities. A client's own value of
    such a field is kept, unless it is null or false; of `numbers` false is kept, too, which is 0. A
    request with any of the fields `spoiling`, and without the field `spared_by`, gets none of them:
    vLLM would then answer it differently, or accept what it refuses without them.
    """

    name: str
    title: str
    path: str
    reply_object: str
    turns: Turns
    sampling: SamplingRules
    unread: tuple[str, ...]
    wanted: Mapping[str, msgspec.Raw]
    spoiling: tuple[str, ...]
    spared_by: str | None = None
    numbers: tuple[str, ...] = ()
    errors: ErrorShape = OPENAI
    forwarded: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with the version's name and those `wanted` fields that it lacks."""
        fields = request.fields
        want_ids = want_ids and not self._is_spoilt(fields)
        added: Object = {
            field: value
            for field, value in self.wanted.items()
            if want_ids and not self._is_asked(field, fields.get(field))
        }
        return with_changes(request, served_name, added)

    def _is_asked(self, field: str, value: Any) -> bool:
        return value is not None and (value is not False or field in self.numbers)

    def _is_spoilt(self, fields: Mapping[str, Any]) -> bool:
        spared = self.spared_by is not None and fields.get(self.spared_by)
        return not spared and any(map(fields.get, self.spoiling))

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Return a transcript of a whole completion."""
        return WholeReply(request, served_name)

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Return a transcript of a completion's chunks."""
        return StreamedReply(request, served_name)

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Return a reader of a whole completion."""
        return WholeReader(request, served_name)

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Return a reader of a completion's chunks."""
        return StreamReader(request, served_name, self.reply_object)


IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
ARRAY, OBJECT = b"["[0], b"{"[0]

_choices: Final = msgspec.json.Decoder(list[Object])
_encode: Final = msgspec.json.Encoder().encode
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Value = TypeVar("Value")


class ReplyFilter:
    """Restore a reply event by event."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with what `request` was given beside the client's own fields."""
        self.hide_ids = IDS in request.injected
        self.hide_logprobs = LOGPROBS in request.injected
        self._model = own_name(request, served_name)
        # The client's name for the model, if the version's was put into the request.
        self.model = None if self._model is None else request.model
        # Whether the last `restore` changed anything; if not, the bytes are passed on as they came.
        self.changed = False
        # Whether the last `restore` removed ids or log-probabilities from a choice.
        self.took = False
        self._served_name = served_name

    def _added_members(self) -> dict[bytes, Member]:
        members: dict[bytes, Member] = {}
        if self.hide_ids:
            members |= dict.fromkeys((b"prompt_token_ids", b"token_ids"), Member(opens=b"["))
        if self.hide_logprobs:
            members[b"logprobs"] = Member(opens=b"{")
        if self._model is not None:
            served = _encode(self._served_name)
            members[b"model"] = Member(opens=b'"', instead=bytes(self._model), only=served)
        return members

    def hide(self, payload: bytes) -> bytes:
        """Return a payload that cannot be parsed with the values of added members replaced."""
        return without(payload, self._added_members())

    def try_restore(self, parsed: Object) -> list[Object] | None:
        """Return what `restore` does, or None for a reply of another shape than the API's."""
        try:
            return self.restore(parsed)
        except ODD_SHAPE:
            return None

    def restore(self, parsed: Object) -> list[Object]:
        """Restore a reply or an event in place, and return its choices for further reading."""
        self.changed = self._model is not None and "model" in parsed
        if self._model is not None and self.changed:
            parsed["model"] = self._model
        self.changed |= self.take_prompt(parsed)
        self.took = False
        raw_choices = parsed.get("choices")
        if raw_choices is None or raw_choices == NULL:
            return []
        choices = _choices.decode(raw_choices)
        changed = False
        for choice in choices:
            changed |= self.take_choice(choice)
        if changed:
            parsed["choices"] = msgspec.Raw(_encode(choices))
        self.changed |= changed
        return choices

    def take_prompt(self, holder: Object) -> bool:
        """Remove prompt ids; a chat has them beside its choices, a completion within each choice.

        Return whether anything was changed.
        """
        raw = holder.get("prompt_token_ids")
        if raw is None or not begins(raw, ARRAY):
            return False
        if self.hide_ids:
            holder["prompt_token_ids"] = NULL
        return self.hide_ids

    def take_choice(self, choice: Object) -> bool:
        """Remove ids and log-probabilities from a choice; return whether anything was changed."""
        changed = self.take_prompt(choice)
        ids = choice.get("token_ids")
        if self.hide_ids and ids is not None and begins(ids, ARRAY):
            choice["token_ids"] = NULL
            changed = self.took = True
        logprobs = choice.get("logprobs")
        if self.hide_logprobs and logprobs is not None and begins(logprobs, OBJECT):
            choice["logprobs"] = NULL
            changed = self.took = True
        return changed


def begins(raw: msgspec.Raw, with_byte: int) -> bool:
    """Return whether a value is of the type that the API gives; others are not ours to touch."""
    return memoryview(raw)[0] == with_byte


class _Token(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """Hold log-probabilities in a chat's form (`content`) or a completion's (`token_logprobs`)."""

    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float]:
        """Return the log-probabilities of either form, without nulls.

        An echoed prompt's first token has null.
        """
        if self.token_logprobs is not None:
            return [value for value in self.token_logprobs if value is not None]
        return [token.logprob for token in self.content or ()]


_ids: Final = msgspec.json.Decoder(list[Id])
_logprobs: Final = msgspec.json.Decoder(Logprobs)


class TokenReader(ReplyFilter):
    """Restore a reply as the worker does, and gather what is removed from it."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with what `request` was given beside the client's own fields."""
        super().__init__(request, served_name)
        # Something removed was not of the API's shape, so none of it can be trusted.
        self._unsound = False
        self.prompt_ids: list[int] | None = None
        self.sampled_ids: list[int] | None = None
        self.sampled_logprobs: list[float] | None = None
        self.indices: set[int] = set()

    def take_prompt(self, holder: Object) -> bool:
        """Gather the prompt ids of a reply or a choice, and remove them as the worker does."""
        ids = self._read(holder.get("prompt_token_ids"), ARRAY, _ids)
        if ids is not None:
            self.prompt_ids = ids
        return super().take_prompt(holder)

    def take_choice(self, choice: Object) -> bool:
        """Gather ids and log-probabilities of a choice, and remove them as the worker does."""
        self._take_index(choice.get("index"))
        ids = self._read(choice.get("token_ids"), ARRAY, _ids)
        if ids is not None:
            self.took_ids(ids)
        logprobs = self._read(choice.get("logprobs"), OBJECT, _logprobs)
        if logprobs is not None:
            self.took_logprobs(logprobs)
        return super().take_choice(choice)

    def _read(
        self, raw: msgspec.Raw | None, opens: int, decoder: msgspec.json.Decoder[Value]
    ) -> Value | None:
        """Return a value that is removed, or None if there is none of the API's type.

        If it cannot be read it is removed all the same.
        """
        if raw is None or not begins(raw, opens):
            return None
        try:
            return decoder.decode(raw)
        except ODD_SHAPE:
            self._unsound = True
            return None

    def _take_index(self, raw: msgspec.Raw | None) -> None:
        try:
            self.indices.add(int(value_of(raw) or 0))
        except ODD_SHAPE:
            self._unsound = True

    def took_ids(self, ids: list[int]) -> None:
        """Add sampled token ids."""
        self.sampled_ids = self.sampled_ids or []
        self.sampled_ids += ids

    def took_logprobs(self, logprobs: Logprobs) -> None:
        """Add the log-probabilities of sampled tokens."""
        self.sampled_logprobs = self.sampled_logprobs or []
        self.sampled_logprobs += logprobs.values()

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        """Return what was gathered, without ids if some of it could not be read."""
        sound = not self._unsound
        return Sampled(
            prompt_ids=_tuple(self.prompt_ids) if sound else None,
            sampled_ids=_tuple(self.sampled_ids) if sound else None,
            sampled_logprobs=_tuple(self.sampled_logprobs) if sound else None,
            choices=len(self.indices),
            completion_tokens=(usage or {}).get("completion_tokens"),
        )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


DONE: Final = b"[DONE]"
EMPTY: Final = msgspec.Raw(b"{}")
RIDERS: Final = ("finish_reason", "token_ids", "logprobs")

ZERO: Final = msgspec.Raw(b"0")


class WholeReply:
    """Follow a completion in one piece, of which nothing leaves before all of it has come."""

    _filters: type[ReplyFilter] = ReplyFilter

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._filter = self._filters(request, served_name)
        self._pieces: list[bytes] = []
        self._parsed: Object | None = None
        self._choices: list[Object] = []
        self._out: bytes | None = None
        self.ended = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the restored reply, byte for byte the upstream's if nothing was added."""
        body = self._out = b"".join(self._pieces)
        self.ended = True
        parsed = parse_object(body)
        choices = None if parsed is None else self._filter.try_restore(parsed)
        if parsed is None or choices is None:
            self._out = self._filter.hide(body)
            return self._out
        self._parsed, self._choices = parsed, choices
        if self._filter.changed:
            self._out = _encode(parsed)
        if not choices:
            self._out = self._filter.hide(self._out)
        return self._out

    def summary(self) -> ReplySummary:
        """Return the first choice's text and tool calls, as far as they can be read."""
        gathering = Gathering()
        if self._parsed is not None:
            try:
                gathering.take(self._parsed, self._choices)
            except ODD_SHAPE:
                # What was gathered before it counts.
                return gathering.summary()
        return gathering.summary()


class StreamedReply:
    """Follow a completion's server-sent events, and restore them one by one as they pass."""

    _filters: type[ReplyFilter] = ReplyFilter

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._filter = self._filters(request, served_name)
        self._events = EventStream(self._data, self._filter.hide, is_done)
        self._gathering = Gathering()
        self._finished: dict[bytes, bool] = {}
        self._unread = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the restored lines that `chunk` completes, up to the one that ends the reply."""
        return self._events.feed(chunk)

    @property
    def at_end(self) -> bool:
        """Return whether `[DONE]` has come."""
        return self._events.at_end

    def release(self) -> bytes:
        """Return the held back end of the stream."""
        return self._events.release()

    def finish(self) -> bytes:
        """Return the held back end of the stream, with any unfinished line."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """Return whether `[DONE]` or each choice's reason to finish came, and all was readable.

        Not every server sends `[DONE]`.
        """
        finished = bool(self._finished) and all(self._finished.values())
        return (self._events.ended or finished) and not (self._unread or self._events.unread)

    def summary(self) -> ReplySummary:
        """Return the first choice's text and tool calls so far."""
        return self._gathering.summary()

    def _data(self, payload: bytes) -> bytes | None:
        if payload == DONE:
            return payload
        parsed = parse_object(payload)
        if parsed is None:
            raise Unread
        choices = self._filter.try_restore(parsed)
        if choices is None:
            self._unread += 1
            return self._filter.hide(payload)
        if self._filter.took and is_ids_only(choices):
            return None
        out = _encode(parsed) if self._filter.changed else payload
        if not choices:
            # Such an event usually holds the usage. Whatever it is, it must show no ids.
            out = self._filter.hide(out)
        try:
            self._follow(parsed, choices, out)
        except ODD_SHAPE:
            self._unread += 1
        return out

    def _follow(self, parsed: Object, choices: list[Object], out: bytes) -> None:
        for choice in choices:
            index = bytes(choice.get("index", ZERO))
            reason = choice.get("finish_reason")
            self._finished[index] = (reason is not None and reason != NULL) or self._finished.get(
                index, False
            )
        self._gathering.take(parsed, choices)


def is_ids_only(choices: list[Object]) -> bool:
    """Return whether a chunk is empty now that what was added is removed.

    vLLM sends a chunk with an empty delta only to carry ids or log-probabilities that were asked
    for. Whatever is still in it was asked for by the client.
    """
    for choice in choices:
        if choice.get("delta") != EMPTY or any(choice.get(n, NULL) != NULL for n in RIDERS):
            return False
    return True


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolPiece(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class Said(msgspec.Struct):
    """Hold the fields of a message or a delta that a later call repeats."""

    content: Any = None
    tool_calls: list[_ToolPiece] | None = None


_said: Final = msgspec.json.Decoder(Said)
_string: Final = msgspec.json.Decoder(str)


class Gathering:
    """Gather the first choice's words and tool calls, piece by piece."""

    def __init__(self) -> None:
        """Begin with nothing gathered."""
        self.response_id: str | None = None
        self._words: list[str] = []
        self._tools: dict[int, list[str]] = {}

    def take(self, parsed: Object, choices: list[Object]) -> None:
        """Add one event, or a whole reply."""
        if self.response_id is None and "id" in parsed:
            self.response_id = string_or_none(value_of(parsed["id"]))
        if not choices or choices[0].get("index", ZERO) != ZERO:
            return
        first = choices[0]
        if (raw := first.get("delta") or first.get("message")) is not None:
            self._take_message(_said.decode(raw))
        elif (raw := first.get("text")) is not None:
            self._words.append(_string.decode(raw))

    def _take_message(self, message: Said) -> None:
        if isinstance(message.content, str):
            self._words.append(message.content)
        for position, piece in enumerate(message.tool_calls or ()):
            # A whole message's calls have no index of their own.
            index = piece.index or position
            known = self._tools.setdefault(index, ["", "", ""])
            function = piece.function or _Function()
            known[0] = piece.id or known[0]
            known[1] = function.name or known[1]
            known[2] += function.arguments or ""

    def summary(self) -> ReplySummary:
        """Return what was gathered so far."""
        calls = [self._tools[index] for index in sorted(self._tools)]
        return ReplySummary(
            response_id=self.response_id,
            text="".join(self._words),
            tool_calls=tuple(ToolCall(id=i, name=n, arguments=a) for i, n, a in calls),
        )


READ: Final = ("id", "usage")
IN_PIECES: Final = ("delta", "text")
CHOICES: Final = ("choices",)
OF_CHOICE: Final = ("finish_reason", "message", "text")

# These strings come whole; all others come in pieces.
WHOLE_STRINGS: Final = frozenset({"role", "id", "type", "name"})


class WholeReader(WholeReply):
    """Read a completion in one piece."""

    _filters = TokenReader
    _filter: TokenReader

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the facts of the first choice, and of the reply if it could be read."""
        if self._parsed is None:
            reply = {} if self._out is None else decoded_object(self._out)
            return _facts(self._out if reply else None, reply or {}, self._filter, whole=self.ended)
        # Only the few fields that the facts need are decoded, not the log-probabilities.
        head = {name: readable_value(self._parsed[name]) for name in READ if name in self._parsed}
        first = self._choices[0] if self._choices else {}
        choice = {name: readable_value(first[name]) for name in OF_CHOICE if name in first}
        read = head | {"choices": [choice]}
        return _facts(self._out, read, self._filter, whole=True)


class StreamReader(StreamedReply):
    """Read a completion's server-sent events, and merge them into one reply."""

    _filters = TokenReader
    _filter: TokenReader

    def __init__(self, request: ModelRequest, served_name: str | None, reply_object: str) -> None:
        """Begin the reply to `request`; `reply_object` is the type that the merged reply gets."""
        super().__init__(request, served_name)
        self._reply_object = reply_object
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def read(self, raw: bytes) -> None:
        """Read a recorded stream for its facts only: nothing leaves, and no summary is gathered."""
        self._events = EventStream(self._reread, self._filter.hide, is_done)
        self._events.feed(raw)

    def _reread(self, payload: bytes) -> bytes:
        event = None if payload == DONE else reread(payload, self._filter)
        if event is None:
            self._data(payload)
            return payload
        for choice in event["choices"]:
            index = b"%d" % choice.get("index", 0)
            if choice.get("finish_reason") is not None or index not in self._finished:
                self._finished[index] = choice.get("finish_reason") is not None
        try:
            self._gather(event)
        except ODD_SHAPE:
            self._unread += 1
        return payload

    def _follow(self, parsed: Object, choices: list[Object], out: bytes) -> None:
        super()._follow(parsed, choices, out)
        self._gather(_decoded(out))

    def _gather(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or []:
            known = self._choices.setdefault(int(choice.get("index") or 0), {})
            if "delta" in choice:
                merge_delta(known.setdefault("message", {}), choice["delta"] or {})
            if "text" in choice:
                known["text"] = known.get("text", "") + choice["text"]
            _take_over(known, choice, IN_PIECES)
        _take_over(self._head, event, CHOICES)

    def facts(self) -> ReplyFacts:
        """Return the facts of the events, merged into one object of the type `reply_object`."""
        if not self._head and not self._choices:
            return _facts(None, {}, self._filter, whole=self._events.ended)
        choices = [self._choices[index] for index in sorted(self._choices)]
        reply = self._head | {"object": self._reply_object, "choices": choices}
        return _facts(_encode(reply), reply, self._filter, whole=self.ended)


def _facts(
    reply: bytes | None, parsed: dict[str, Any], filtered: TokenReader, *, whole: bool
) -> ReplyFacts:
    choices = parsed.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    first = first if isinstance(first, dict) else {}
    usage = parsed.get("usage") if isinstance(parsed.get("usage"), dict) else None
    return ReplyFacts(
        reply=reply,
        response_id=string_or_none(parsed.get("id")),
        finish=string_or_none(first.get("finish_reason")),
        usage=usage,
        tool_calls=_tool_calls(first.get("message")),
        sampled=filtered.sampled(usage),
        whole=whole,
        text=_text(first),
    )


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    return content if isinstance(content, str) else ""


def _tool_calls(message: Any) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    tool_calls = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and call.get("id"):
            tool_calls.append(
                ToolCall(
                    id=str(call["id"]),
                    name=str(function.get("name") or ""),
                    arguments=str(function.get("arguments") or ""),
                )
            )
    return tuple(tool_calls)


def _take_over(known: dict[str, Any], event: dict[str, Any], without: tuple[str, ...]) -> None:
    """Copy the members of `event` but those in `without`; a null replaces nothing."""
    for name, value in event.items():
        if name not in without and (value is not None or name not in known):
            known[name] = value


def _decoded(payload: bytes) -> dict[str, Any]:
    """Return an event's values; a number beyond a float's range, as `1E400`, is infinite."""
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError:
        event: dict[str, Any] = json.loads(payload)
        return event


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: Said | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[Id] | None = None
    token_ids: list[Id] | None = None
    logprobs: Logprobs | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[Id] | None = None


_event: Final = msgspec.json.Decoder(dict[str, Any])
_typed: Final = msgspec.json.Decoder(_Event)


def reread(payload: bytes, filtered: TokenReader) -> dict[str, Any] | None:
    """Return the event as the client saw it, and add what is removed from it to `filtered`.

    Return None for an event that is not of the usual shape; then nothing is added.
    """
    if nests_too_deep(payload):
        return None
    try:
        event, typed = _event.decode(payload), _typed.decode(payload)
    except ODD_SHAPE:
        return None
    if not event["choices"] or not all(map(_is_usual, event["choices"])):
        return None
    if filtered.model is not None and "model" in event:
        event["model"] = filtered.model
    _take_prompt(event, typed.prompt_token_ids, filtered)
    for choice, read in zip(event["choices"], typed.choices, strict=True):
        _take_choice(choice, read, filtered)
    return event


def _is_usual(choice: dict[str, Any]) -> bool:
    """Return whether a choice has a non-empty delta or text, and a whole number as index.

    An event with an empty delta may have been dropped.
    """
    says = choice.get("delta", "text" in choice)
    return bool(says) and "message" not in choice and type(choice.get("index", 0)) is int


def _take_prompt(holder: dict[str, Any], ids: list[int] | None, filtered: TokenReader) -> None:
    if ids is not None:
        filtered.prompt_ids = ids
        if filtered.hide_ids:
            holder["prompt_token_ids"] = None


def _take_choice(choice: dict[str, Any], read: _Choice, filtered: TokenReader) -> None:
    filtered.indices.add(read.index)
    _take_prompt(choice, read.prompt_token_ids, filtered)
    if read.token_ids is not None:
        filtered.took_ids(read.token_ids)
        if filtered.hide_ids:
            choice["token_ids"] = None
    if read.logprobs is not None:
        filtered.took_logprobs(read.logprobs)
        if filtered.hide_logprobs:
            choice["logprobs"] = None


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add one delta to `message`, in place.

    Strings are appended, lists whose members have an `index` are merged by it, and anything else is
    replaced.
    """
    for name, value in delta.items():
        known = message.get(name)
        if value is None:
            message.setdefault(name, None)
        elif isinstance(value, str) and isinstance(known, str) and name not in WHOLE_STRINGS:
            message[name] = known + value
        elif isinstance(value, dict) and isinstance(known, dict):
            merge_delta(known, value)
        elif isinstance(value, list) and all(_indexed(member) for member in value):
            message[name] = _merge_indexed(known or [], value)
        else:
            message[name] = value


def _indexed(member: object) -> bool:
    return isinstance(member, dict) and isinstance(member.get("index"), int)


def _merge_indexed(
    known: list[dict[str, Any]], pieces: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    by_index = {member["index"]: member for member in known}
    for piece in pieces:
        merge_delta(by_index.setdefault(piece["index"], {}), piece)
    return [by_index[index] for index in sorted(by_index)]
