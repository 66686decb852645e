"""Common part of chat completions and text completions, which both answer in `choices` (pure).

`return_token_ids`, `logprobs` and the version's name as `model` are added to a request. In the
reply the resulting values are set to `null` again, as vLLM sends them if they are not requested,
the client's model name is put back, and extra chunks that carry nothing but ids are dropped.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from proxy.formats.base import (
    DONE,
    ModelRequest,
    ReplyFacts,
    ReplyParser,
    ReplySummary,
    SampledTokens,
    UnreadableEvent,
    WireFormat,
    with_changes,
)
from proxy.formats.conversation import objects
from proxy.formats.raw_json import (
    ARRAY,
    NULL,
    OBJECT,
    ODD_SHAPE,
    Object,
    Replacement,
    TokenId,
    decoded_object,
    parse_object,
    readable_value,
    string_or_none,
    value_of,
)
from store.records import ToolCall

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# Memory that a piece of text takes beside its characters (approximate).
PIECE_BYTES: Final = 64


class ChoicesFormat(WireFormat):
    """Base of chat completions and text completions.

    `token_data_fields` make vLLM send ids and log-probabilities. A client's own value is kept
    unless it is null or false; in `number_fields` false is kept, too, as it means 0. If a request
    has one of the `blocking_fields` and not the `unblocking_field`, nothing is added: vLLM would
    answer differently, or accept a request that it should refuse.
    """

    token_data_fields: Mapping[str, msgspec.Raw]
    blocking_fields: tuple[str, ...]
    unblocking_field: str | None = None
    number_fields: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request for model `served_name`; with `want_ids`, add `token_data_fields`."""
        fields = request.fields
        is_unblocked = self.unblocking_field is not None and fields.get(self.unblocking_field)
        if not is_unblocked and any(map(fields.get, self.blocking_fields)):
            want_ids = False
        added: Object = {
            field: value
            for field, value in self.token_data_fields.items()
            if want_ids and not self._is_kept(field, fields.get(field))
        }
        return with_changes(request, served_name, added)

    def _is_kept(self, field: str, value: Any) -> bool:
        return value is not None and (value is not False or field in self.number_fields)


_EMPTY: Final = msgspec.Raw(b"{}")
_ZERO: Final = msgspec.Raw(b"0")
_BESIDE_DELTA: Final = ("finish_reason", "token_ids", "logprobs")
# The fields of a whole reply, and of its first choice, that the facts need decoded.
_OF_REPLY: Final = ("id", "usage")
_OF_CHOICE: Final = ("finish_reason", "message", "text")
_ARRAY: Final = ARRAY[0]
_OBJECT: Final = OBJECT[0]
_choices: Final = msgspec.json.Decoder(list[Object])
_encode: Final = msgspec.json.Encoder().encode


class ChoicesReply(ReplyParser):
    """Parser of a completion in one piece, or in chunks.

    A reply is decoded level by level with values as bytes, and encoded again only if values were
    removed or replaced. A reply without the API's shape keeps its form: members that only Pawl
    asked for are removed at any depth, and the client's name for the model is put back. Its call is
    not trainable.
    """

    # Data to store, gathered only when the reply is read for the database.
    _tokens: "_TokenData | None" = None
    _merged: "_MergedChunks | None" = None
    # Whether the last `_hide_added` changed anything, and whether it removed values from a choice.
    _changed = False
    _removed_from_choice = False
    _response_id: str | None = None
    # A whole reply: the client's bytes, and its parsed parts if it has the API's shape.
    _out: bytes | None = None
    _parsed: Object | None = None
    _choices: Sequence[Object] = ()

    # The type of a whole reply, also set on merged chunks.
    reply_object = ""

    def begin(self) -> None:
        self._hide_ids = IDS in self._request.injected
        self._hide_logprobs = LOGPROBS in self._request.injected
        if self._reading:
            self._tokens = _TokenData()
            if self._streamed:
                self._merged = _MergedChunks(self.reply_object)
        # The first choice's text, and its tool calls by index: id and name, and arguments.
        self._texts = TextPieces()
        self._tools: dict[int, tuple[dict[str, str], TextPieces]] = {}
        # By index of a stream's choice: whether its `finish_reason` has come.
        self._finished: dict[bytes, bool] = {}

    @property
    def ended(self) -> bool:
        """Return whether `[DONE]` or every choice's `finish_reason` came, and all was readable.

        Not every server sends `[DONE]`.
        """
        is_finished = bool(self._finished) and all(self._finished.values())
        return (self._end_seen or is_finished) and not self._unreadable_events

    def client_reply(self, body: bytes) -> bytes:
        """Return the client's completion; `body` itself if nothing was removed or replaced."""
        parsed = parse_object(body)
        choices = None if parsed is None else self._hide_added(parsed)
        if parsed is None or choices is None:
            self._out = self.hide_added_members(body)
            return self._out
        self._parsed, self._choices = parsed, choices
        out = _encode(parsed) if self._changed else body
        self._out = out if choices else self.hide_added_members(out)
        if not self._reading:
            try:
                self._gather(parsed, choices)
            except ODD_SHAPE:
                # Data gathered before the error is kept.
                return self._out
        return self._out

    def client_event(self, data: bytes) -> bytes | None:
        """Return the client's chunk, or None if it has only values that Pawl asked for."""
        if data == DONE:
            return data
        parsed = parse_object(data)
        if parsed is None:
            raise UnreadableEvent
        choices = self._hide_added(parsed)
        if choices is None:
            self._unreadable_events += 1
            return self.hide_added_members(data)
        if self._removed_from_choice and _is_ids_only(choices):
            return None
        out = data
        if self._changed and (self._merged is None or not choices):
            out = _encode(parsed)
        if not choices:
            # Such an event usually holds the usage. Whatever it is, it must show no ids.
            out = self.hide_added_members(out)
            parsed = parse_object(out) or parsed
        try:
            for choice in choices:
                index, reason = bytes(choice.get("index", _ZERO)), choice.get("finish_reason")
                is_finished = reason is not None and reason != NULL
                self._finished[index] = is_finished or self._finished.get(index, False)
            self._gather(parsed, choices)
        except ODD_SHAPE:
            self._unreadable_events += 1
        return out

    def added_members(self, data: bytes) -> dict[bytes, Replacement]:
        return members_added_by(self._request)

    def summary(self) -> ReplySummary:
        """Return the reply's id, and its first choice's text and tool calls so far."""
        calls = [self._tools[index] for index in sorted(self._tools)]
        return ReplySummary(
            response_id=self._response_id,
            text="".join(self._texts),
            tool_calls=tuple(ToolCall(arguments="".join(a), **named) for named, a in calls),
        )

    def facts(self) -> ReplyFacts:
        """Return the facts to store; those read from a choice are the first choice's."""
        reply, choices = self._out, None
        head = {} if self._merged is None else self._merged.reply()
        if head:
            reply, choices = _encode(head), head["choices"]
        elif self._parsed is not None:
            # Only the few fields that the facts need are decoded, not the log-probabilities.
            head = _decoded_fields(self._parsed, _OF_REPLY)
            choices = [_decoded_fields(choice, _OF_CHOICE) for choice in self._choices[:1]]
        elif reply is not None:
            head = decoded_object(reply) or {}
            choices = head.get("choices")
            reply = reply if head else None
        first = choices[0] if isinstance(choices, list) and choices else None
        first = first if isinstance(first, dict) else {}
        message, usage = first.get("message"), head.get("usage")
        usage = usage if isinstance(usage, dict) else None
        text = message.get("content") if isinstance(message, dict) else first.get("text")
        return ReplyFacts(
            reply=reply,
            response_id=string_or_none(head.get("id")),
            finish=string_or_none(first.get("finish_reason")),
            usage=usage,
            tool_calls=_tool_calls(message),
            sampled=(self._tokens or _TokenData()).sampled(usage),
            text=string_or_none(text) or "",
        )

    def _hide_added(self, parsed: dict[str, Any]) -> list[Object] | None:
        """Remove added values and put the client's model name back, in place.

        Return the choices, or None if they lack the API's shape.
        """
        changed = False
        if self._model is not None and "model" in parsed:
            parsed["model"] = self._model
            changed = True
        changed |= self._gather_prompt_ids(parsed)
        self._removed_from_choice = False
        raw_choices = parsed.get("choices")
        choices: list[Object] = []
        if raw_choices is not None and raw_choices != NULL:
            try:
                choices = _choices.decode(raw_choices)
            except ODD_SHAPE:
                return None
            choices_changed = False
            for choice in choices:
                choices_changed |= self._gather_choice(choice)
            if choices_changed:
                changed = True
                if self._merged is None:
                    parsed["choices"] = choices
        self._changed = changed
        return choices

    def _gather(self, parsed: Object, choices: list[Object]) -> None:
        """Gather a chunk whole if it will be stored, else the parts that a later call may repeat.

        Raises:
            one of `ODD_SHAPE`: the data lacks the API's shape; part of it may have been gathered.
        """
        if self._response_id is None and "id" in parsed:
            self._response_id = string_or_none(value_of(parsed["id"]))
        message = _first_message(choices)
        if self._merged is not None:
            self._merged.add(parsed, choices)
            return
        if message is None:
            return
        if isinstance(message.content, str):
            self._texts.append(message.content)
            self.gathered += len(message.content) + PIECE_BYTES
        for position, piece in enumerate(message.tool_calls or ()):
            # The tool calls of a message in one piece have no index.
            index, function = piece.index or position, piece.function or FunctionPiece()
            if index not in self._tools:
                self._tools[index] = {"id": "", "name": ""}, TextPieces()
            named, arguments = self._tools[index]
            named["id"] = piece.id or named["id"]
            named["name"] = function.name or named["name"]
            arguments.append(function.arguments or "")
            self.gathered += len(arguments[-1]) + PIECE_BYTES

    def _gather_prompt_ids(self, holder: Object) -> bool:
        """Gather prompt ids, and hide added ones; return whether anything was changed.

        A chat has them beside its choices, a completion within each choice.
        """
        raw = holder.get("prompt_token_ids")
        # Values whose type is not the API's are left alone.
        if raw is None or memoryview(raw)[0] != _ARRAY:
            return False
        if self._tokens is not None:
            self._tokens.add_prompt(raw)
        if self._hide_ids:
            holder["prompt_token_ids"] = NULL
        return self._hide_ids

    def _gather_choice(self, choice: Object) -> bool:
        """Gather a choice's token data, hide what only Pawl asked for; return if it was changed."""
        changed = self._gather_prompt_ids(choice)
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is not None and memoryview(ids)[0] != _ARRAY:
            ids = None
        if logprobs is not None and memoryview(logprobs)[0] != _OBJECT:
            logprobs = None
        if self._tokens is not None:
            self._tokens.add(choice.get("index"), ids, logprobs)
        if self._hide_ids and ids is not None:
            choice["token_ids"] = NULL
            changed = self._removed_from_choice = True
        if self._hide_logprobs and logprobs is not None:
            choice["logprobs"] = NULL
            changed = self._removed_from_choice = True
        return changed


class FunctionPiece(msgspec.Struct, gc=False):
    """Piece of a tool call: the name, if it comes now, and the next part of the arguments."""

    name: str | None = None
    arguments: str | None = None


class _ToolPiece(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: FunctionPiece | None = None


class _RepeatableParts(msgspec.Struct):
    """Fields of a message or a delta that a later call may repeat."""

    content: Any = None
    tool_calls: list[_ToolPiece] | None = None


_parts_decoder: Final = msgspec.json.Decoder(_RepeatableParts)
_string: Final = msgspec.json.Decoder(str)


def _first_message(choices: list[Object]) -> _RepeatableParts | None:
    """Return the message or delta of the first choice (index 0), or None if not listed first."""
    if not choices or choices[0].get("index", _ZERO) != _ZERO:
        return None
    first = choices[0]
    if (raw := first.get("delta") or first.get("message")) is not None:
        return _parts_decoder.decode(raw)
    if (raw := first.get("text")) is not None:
        return _RepeatableParts(content=_string.decode(raw))
    return None


def members_added_by(request: ModelRequest) -> dict[bytes, Replacement]:
    """Return, by name, how to hide the reply's members that result from fields Pawl added."""
    members: dict[bytes, Replacement] = {}
    if IDS in request.injected:
        members |= dict.fromkeys((b"prompt_token_ids", b"token_ids"), Replacement(opens=ARRAY))
    if LOGPROBS in request.injected:
        members[b"logprobs"] = Replacement(opens=OBJECT)
    return members


def _is_ids_only(choices: list[Object]) -> bool:
    """Return whether a chunk is empty, now that the values that only Pawl requested are removed.

    vLLM sends a chunk with an empty delta only to carry ids or log-probabilities. If it still has
    some, the client requested them.
    """
    for choice in choices:
        if choice.get("delta") != _EMPTY or any(choice.get(n, NULL) != NULL for n in _BESIDE_DELTA):
            return False
    return True


def _decoded_fields(holder: Object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: readable_value(holder[name]) for name in names if name in holder}


def _tool_calls(message: Any) -> tuple[ToolCall, ...]:
    calls = objects(message.get("tool_calls")) if isinstance(message, dict) else ()
    return tuple(
        ToolCall(
            id=str(call["id"]),
            name=str(function.get("name") or ""),
            arguments=str(function.get("arguments") or ""),
        )
        for call in calls
        if isinstance(function := call.get("function"), dict) and call.get("id")
    )


Value = TypeVar("Value")


class TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """Log-probabilities in a chat's form (`content`) or a completion's (`token_logprobs`)."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[float | None] | None = None


_ids: Final = msgspec.json.Decoder(list[TokenId])
_logprobs: Final = msgspec.json.Decoder(Logprobs)


class _TokenData:
    """Collector of a reply's token ids and log-probabilities, chunk by chunk."""

    def __init__(self) -> None:
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] | None = None
        self._logprobs: list[float] | None = None
        self._indices: set[int] = set()
        # Some values lacked the API's shape, so none can be trusted.
        self._unsound = False

    def add_prompt(self, raw: msgspec.Raw) -> None:
        """Store prompt ids, replacing earlier ids."""
        try:
            self._prompt_ids = _ids.decode(raw)
        except ODD_SHAPE:
            self._unsound = True

    def add(
        self, index: msgspec.Raw | None, ids: msgspec.Raw | None, logprobs: msgspec.Raw | None
    ) -> None:
        """Add the ids and log-probabilities of a choice, or of one chunk of it."""
        try:
            self._indices.add(_index_of(index))
            if ids is not None:
                self._ids = self._ids or []
                self._ids += _ids.decode(ids)
        except ODD_SHAPE:
            self._unsound = True
        if logprobs is not None:
            self._logprobs = self._logprobs or []
            try:
                decoded = _logprobs.decode(logprobs)
            except ODD_SHAPE:
                self._unsound = True
                return
            if decoded.token_logprobs is not None:
                # An echoed prompt's first token has null.
                self._logprobs += [value for value in decoded.token_logprobs if value is not None]
            elif decoded.content is not None:
                self._logprobs += [token.logprob for token in decoded.content]

    def sampled(self, usage: dict[str, Any] | None) -> SampledTokens:
        """Return the data of all choices, with the number of tokens that `usage` has.

        If any value was unreadable, all ids and log-probabilities are None.
        """
        gathered: tuple[Any, ...] = (self._prompt_ids, self._ids, self._logprobs)
        prompt_ids, ids, logprobs = (
            None if values is None or self._unsound else tuple(values) for values in gathered
        )
        return SampledTokens(
            prompt_ids=prompt_ids,
            sampled_ids=ids,
            sampled_logprobs=logprobs,
            choices=len(self._indices),
            completion_tokens=(usage or {}).get("completion_tokens"),
        )


# These strings come whole; all others come in pieces.
_WHOLE_STRINGS: Final = frozenset({"role", "id", "type", "name"})
_CONTENT_FIELDS: Final = frozenset({"delta", "text", "message"})


class _MergedChunks:
    """Merge a stream's chunks into one reply, as the client saw them.

    Fields that come whole stay bytes until the end: each chunk repeats most of them.
    """

    def __init__(self, reply_object: str) -> None:
        self._reply_object = reply_object
        self._head: Object = {}
        # By index: each choice's message or text so far, and the choice's other fields.
        self._choices: dict[int, tuple[dict[str, Any], Object]] = {}

    def add(self, chunk: Object, choices: list[Object]) -> None:
        """Add one chunk.

        Raises:
            one of `ODD_SHAPE`: the chunk lacks the API's shape; part of it may have been added.
        """
        for choice in choices:
            index = _index_of(choice.get("index"))
            if index not in self._choices:
                self._choices[index] = {}, {}
            content, others = self._choices[index]
            if "delta" in choice:
                _merge_delta(content.setdefault("message", {}), _decoded(choice["delta"]) or {})
            if "text" in choice:
                append_text(content, "text", _decoded(choice["text"]))
            if "message" in choice:
                message = _decoded(choice["message"])
                if message is not None or "message" not in content:
                    content["message"] = message
            for name, raw in choice.items():
                if name not in _CONTENT_FIELDS and (raw != NULL or name not in others):
                    others[name] = raw
        for name, raw in chunk.items():
            if raw != NULL or name not in self._head:
                self._head[name] = raw

    def reply(self) -> dict[str, Any]:
        """Return the merged reply, empty if there were no chunks."""
        if not (self._head or self._choices):
            return {}
        choices = []
        for index in sorted(self._choices):
            content, others = self._choices[index]
            others_decoded = {name: _decoded(raw) for name, raw in others.items()}
            choices.append(join_pieces(content) | others_decoded)
        head = {name: _decoded(raw) for name, raw in self._head.items() if name != "choices"}
        return head | {"object": self._reply_object, "choices": choices}


def _index_of(raw: msgspec.Raw | None) -> int:
    return 0 if raw is None or raw == _ZERO else int(value_of(raw) or 0)


def _decoded(raw: msgspec.Raw) -> Any:
    """Return a parsed value; a number beyond a float's range, such as `1E400`, is infinite."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return json.loads(bytes(raw))


class TextPieces(list[str]):
    """Text that comes in pieces: adding a piece takes constant time."""


class _IndexedList(msgspec.Struct, gc=False):
    """List that comes in pieces: its members so far, by their `index`."""

    members: dict[int, dict[str, Any]]


def append_text(holder: dict[str, Any], name: str, piece: str) -> None:
    """Append a piece to the text `holder[name]`, which becomes `TextPieces`.

    Raises:
        TypeError: the present value or the piece is not text.
    """
    present = holder.get(name, "")
    if not isinstance(piece, str) or not isinstance(present, str | TextPieces):
        raise TypeError(f"{name} is not text")
    if isinstance(present, str):
        present = holder[name] = TextPieces([present])
    present.append(piece)


def join_pieces(value: Any) -> Any:
    """Return a value with all text and list pieces joined; change objects and lists in place."""
    if isinstance(value, TextPieces):
        return "".join(value)
    if isinstance(value, _IndexedList):
        return [join_pieces(value.members[index]) for index in sorted(value.members)]
    if isinstance(value, dict):
        value.update([(name, join_pieces(member)) for name, member in value.items()])
    elif isinstance(value, list):
        value[:] = map(join_pieces, value)
    return value


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add one delta to `message`, in place; `join_pieces` joins the pieces at the end.

    Strings are appended, lists whose members have an `index` are merged by it, and other values
    replace earlier ones.
    """
    for name, value in delta.items():
        present = message.get(name)
        if value is None:
            message.setdefault(name, None)
        elif (
            isinstance(value, str)
            and isinstance(present, str | TextPieces)
            and name not in _WHOLE_STRINGS
        ):
            append_text(message, name, value)
        elif isinstance(value, dict) and isinstance(present, dict):
            _merge_delta(present, value)
        elif isinstance(value, list) and all(map(_is_indexed, value)):
            if not isinstance(present, _IndexedList):
                present = _IndexedList({member["index"]: member for member in present or []})
            for piece in value:
                _merge_delta(present.members.setdefault(piece["index"], {}), piece)
            message[name] = present
        else:
            message[name] = value


def _is_indexed(member: object) -> bool:
    return isinstance(member, dict) and isinstance(member.get("index"), int)
