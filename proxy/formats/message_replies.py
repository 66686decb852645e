"""Turn chat completions into Anthropic's messages, or forward messages as they are (pure)."""

import json
import re
from hashlib import sha256
from typing import Annotated, Any, Final

import msgspec

from proxy.formats.base import (
    NOTHING_SAMPLED,
    ModelRequest,
    ReplyFacts,
    ReplySummary,
    Sampled,
    own_name,
)
from proxy.formats.choices import DONE, ReplyFilter
from proxy.formats.errors import ANTHROPIC, ERROR_STATUSES
from proxy.formats.raw_json import (
    UNREADABLE,
    Member,
    Object,
    decoded_object,
    parse_object,
    value_of,
    without,
)
from proxy.formats.sse import BOM, EventStream, Lines, Unread, is_done
from store.records import ToolCall
from store.values.json_limits import MAX_DEPTH, most_of, nests_too_deep

# An escape in a string; the group is a surrogate without its other half.
ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
REPLACED: Final = rb"\ufffd"
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ChatFunction(msgspec.Struct):
    """Hold a tool call's name, which comes whole, and its arguments, which come in pieces."""

    name: str | None = None
    arguments: str | None = None


class ChatToolCall(msgspec.Struct):
    """Hold a tool call, or a piece of one."""

    index: int = 0
    id: str | None = None
    function: ChatFunction = msgspec.field(default_factory=ChatFunction)


class ChatMessage(msgspec.Struct):
    """Hold a message, or a piece of one."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatToken(msgspec.Struct):
    """Hold the log-probability of one sampled token."""

    logprob: float


class ChatLogprobs(msgspec.Struct):
    """Hold the log-probabilities of a choice, or of a piece of one."""

    content: list[ChatToken] | None = None


class ChatChoice(msgspec.Struct):
    """Hold the only choice of a whole reply (`message`) or of a chunk (`delta`)."""

    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: ChatLogprobs | None = None


class Details(msgspec.Struct):
    """Count the prompt tokens that were read from a cache, or written to it."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    """Count tokens, as the server states them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class ChatReply(msgspec.Struct):
    """Hold a chat completion, a chunk of one, or an error in its place."""

    id: str | None = None
    model: str | None = None
    choices: list[ChatChoice] | None = None
    usage: ChatUsage | None = None
    prompt_token_ids: list[TokenId] | None = None
    error: Any = None


def read_reply(payload: bytes) -> ChatReply | None:
    """Return the parsed reply or chunk, or None if it is neither."""
    try:
        return msgspec.json.decode(payload, type=ChatReply)
    except UNREADABLE:
        return None


def read_repaired(body: bytes) -> ChatReply | None:
    """Return a reply with U+FFFD for each lone surrogate and each byte that is not UTF-8."""
    text = body.decode(errors="replace").encode()
    return read_reply(ESCAPE.sub(lambda m: REPLACED if m[1] else m[0], text))


class ChatTokens:
    """Gather ids and log-probabilities, chunk by chunk."""

    def __init__(self) -> None:
        """Begin with nothing gathered."""
        self._prompt: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._told: set[str] = set()
        self._counted: int | None = None

    def take(self, reply: ChatReply) -> None:
        """Add the token data of a reply, or of a chunk of one."""
        if reply.prompt_token_ids is not None:
            self._prompt = reply.prompt_token_ids
        if reply.usage is not None:
            self._counted = reply.usage.completion_tokens
        for choice in reply.choices or ():
            if choice.token_ids is not None:
                self._told.add("ids")
                self._ids += choice.token_ids
            if choice.logprobs is not None:
                self._told.add("logprobs")
                self._logprobs += (token.logprob for token in choice.logprobs.content or ())

    def sampled(self) -> Sampled:
        """Return what was gathered; None for what never came."""
        return Sampled(
            prompt_ids=None if self._prompt is None else tuple(self._prompt),
            sampled_ids=tuple(self._ids) if "ids" in self._told else None,
            sampled_logprobs=tuple(self._logprobs) if "logprobs" in self._told else None,
            choices=1,
            completion_tokens=self._counted,
        )


Event = dict[str, Any]
NO_MESSAGE: Final = ChatMessage()


def encode_event(event: Event) -> bytes:
    """Return an event as bytes of a stream."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def usage_of(usage: ChatUsage | None) -> dict[str, int]:
    """Return Anthropic's usage; it counts cached tokens beside the input, OpenAI's within it."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.prompt_tokens_details
    cached = {
        "cache_creation_input_tokens": None if details is None else details.created_cache_tokens,
        "cache_read_input_tokens": None if details is None else details.cached_tokens,
    }
    present = {name: count for name, count in cached.items() if count is not None}
    fresh = max(0, usage.prompt_tokens - sum(present.values()))
    return {"input_tokens": fresh, "output_tokens": usage.completion_tokens or 0} | present


def stop_reason(
    finish: str | None, stop: int | str | None, *, tool_used: bool, tool_complete: bool
) -> tuple[str | None, str | None]:
    """Return a message's `stop_reason` and `stop_sequence`.

    A stop string that cut a tool call short takes precedence: half a call must not be run.

    Args:
        finish: the completion's `finish_reason`.
        stop: the string or token that stopped it, if any.
        tool_used: the reply calls a tool.
        tool_complete: the arguments of its last tool call are whole.
    """
    if finish == "length":
        return "max_tokens", None
    if finish not in ("stop", "tool_calls"):
        return None, None
    if tool_complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if tool_used or finish == "tool_calls" else "end_turn"), None


def signature_of(reply_id: str | None, index: int) -> str:
    """Return a thinking block's signature, which clients send back and nobody verifies."""
    return sha256(f"{reply_id}/{index}".encode()).hexdigest()[:32]


def whole_message(reply: ChatReply, choice: ChatChoice, model: str | None) -> dict[str, Any]:
    """Return the message that a whole chat completion makes."""
    answer = choice.message or NO_MESSAGE
    calls = answer.tool_calls or []
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        signature = signature_of(reply.id, 0)
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    content += [_tool_use(call) for call in calls]
    reason, sequence = stop_reason(
        choice.finish_reason, choice.stop_reason, tool_used=bool(calls), tool_complete=bool(calls)
    )
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    return (
        {"id": reply.id, "type": "message", "role": "assistant"}
        | {"content": content or [{"type": "text", "text": ""}], "model": model}
        | {name: value for name, value in ended.items() if value is not None}
        | {"usage": usage_of(reply.usage)}
    )


def _tool_use(call: ChatToolCall) -> dict[str, Any]:
    block = {"type": "tool_use", "id": call.id, "name": call.function.name}
    return block | {"input": _input(call.function.arguments or "")}


def _input(arguments: str) -> msgspec.Raw:
    """Return arguments in the form of vLLM's JSON; an empty object if they are not one."""
    try:
        value = json.loads(arguments)
        if not isinstance(value, dict):
            return msgspec.Raw(b"{}")
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return msgspec.Raw(b"{}")
    # A lone surrogate cannot be encoded as UTF-8, only as an escape.
    return msgspec.Raw(text.encode(errors="backslashreplace"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class MessageEvents:
    """Turn a completion's chunks into events; `model`, if given, replaces the model's name."""

    def __init__(self, model: str | None) -> None:
        """Begin before the first chunk."""
        self._model = model
        self._id: str | None = None
        self._started = False
        self._index = 0
        self._open: str | None = None
        self._tool: str | None = None
        self._tools: dict[int, str] = {}
        # The arguments in the last tool's block; None before there is one.
        self._arguments: list[str] | None = None
        # Text within a tool's block waits for the block's end.
        self._waiting: list[str] = []
        self._finish: str | None = None
        self._stop: int | str | None = None

    def take(self, chunk: ChatReply) -> list[Event]:
        """Return a chunk's events; the first opens the message, one without choices ends it."""
        if not self._started:
            return [self._start(chunk)]
        if not chunk.choices:
            return [*self._close(), self._end(chunk.usage)]
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
        return self._said(choice.delta or NO_MESSAGE)

    def stop(self) -> list[Event]:
        """Return the last events."""
        return [*self._close(), {"type": "message_stop"}]

    def _start(self, chunk: ChatReply) -> Event:
        self._started, self._id = True, chunk.id
        message: Event = {"id": chunk.id, "type": "message", "role": "assistant", "content": []}
        message |= {"model": self._model or chunk.model, "stop_reason": None}
        message |= {"stop_sequence": None, "usage": usage_of(chunk.usage)}
        return {"type": "message_start", "message": message}

    def _end(self, usage: ChatUsage | None) -> Event:
        arguments = self._arguments
        reason, sequence = stop_reason(
            self._finish or "stop",
            self._stop,
            tool_used=arguments is not None,
            tool_complete=arguments is not None and _is_json("".join(arguments)),
        )
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return {"type": "message_delta", "delta": delta, "usage": usage_of(usage)}

    def _said(self, delta: ChatMessage) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._piece("thinking", delta.reasoning)
        if delta.content and self._open == "tool_use":
            self._waiting.append(delta.content)
        elif delta.content:
            events += self._piece("text", delta.content)
        for call in delta.tool_calls or ():
            events += self._call(call)
        return events

    def _piece(self, kind: str, text: str) -> list[Event]:
        """Return the events of a piece of text or thinking, within a block of its kind."""
        events = [] if self._open == kind else [*self._close(), self._block(kind, {kind: ""})]
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ChatToolCall) -> list[Event]:
        events: list[Event] = []
        name, arguments = call.function.name, call.function.arguments
        if call.id is not None:
            self._tools[call.index] = call.id
            if self._tool != call.id and name is not None:
                tool_use = {"id": call.id, "name": name, "input": {}}
                events = [*self._close(), self._block("tool_use", tool_use)]
                self._tool, self._arguments = call.id, []
        running = self._tool is not None and self._tool == self._tools.get(call.index)
        if arguments and running and self._arguments is not None:
            self._arguments.append(arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _block(self, kind: str, content: dict[str, Any]) -> Event:
        self._open = kind
        block = {"type": kind} | content
        return {"type": "content_block_start", "content_block": block, "index": self._index}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "delta": delta, "index": self._index}

    def _close(self) -> list[Event]:
        """Return the events that end the open block, and the text that waited for its end."""
        waiting, self._waiting = "".join(self._waiting), []
        events = self._end_block()
        if waiting:
            events += [*self._piece("text", waiting), *self._end_block()]
        return events

    def _end_block(self) -> list[Event]:
        if self._open is None:
            return []
        events: list[Event] = []
        if self._open == "thinking":
            signature = signature_of(self._id, self._index)
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        events.append({"type": "content_block_stop", "index": self._index})
        self._index += 1
        self._open = self._tool = None
        return events


# The field of a block where a tool's input is gathered until the block ends.
PARTIAL_INPUT: Final = "_input"
# By a delta's type: its field, and the block's field that it is appended to.
_BLOCK_DELTAS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", PARTIAL_INPUT),
}


def merge_message_event(message: dict[str, Any], event: dict[str, Any]) -> None:
    """Add one event of Anthropic's stream to `message`, in place; a malformed one adds nothing."""
    kind, index = event.get("type"), event.get("index")
    if kind == "message_start" and isinstance(event.get("message"), dict):
        message |= event["message"] | {"content": []}
    elif kind == "message_delta":
        for part in ("delta", "usage"):
            values = event.get(part)
            target = message if part == "delta" else message.setdefault("usage", {})
            if isinstance(values, dict) and isinstance(target, dict):
                target |= values
    elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
        message.setdefault("content", []).append(dict(event["content_block"]))
    elif kind in ("content_block_delta", "content_block_stop"):
        content = message.get("content", [])
        if isinstance(index, int) and 0 <= index < len(content):
            _merge_block(content[index], event.get("delta"), stop=kind == "content_block_stop")


def _input_of(text: str) -> Any:
    """Return a tool's input: text if it is not JSON, unparsed if it nests too deep."""
    encoded = text.encode(errors="surrogatepass")
    if nests_too_deep(encoded):
        return msgspec.Raw(encoded)
    try:
        return msgspec.json.decode(encoded) if encoded else {}
    except UNREADABLE:
        return text


def _merge_block(block: dict[str, Any], delta: Any, *, stop: bool) -> None:
    """Append a delta to a block; a tool's input is JSON in pieces, parsed at the block's end."""
    if stop and PARTIAL_INPUT in block:
        block["input"] = _input_of(block.pop(PARTIAL_INPUT))
    if isinstance(delta, dict) and delta.get("type") in _BLOCK_DELTAS:
        source, target = _BLOCK_DELTAS[delta["type"]]
        if isinstance(delta.get(source), str):
            block[target] = str(block.get(target) or "") + delta[source]


ENVELOPE: Final = "message"
LAST_EVENT: Final = b"message_stop"
Message = dict[str, Any]


def message_facts(
    message: Message | None, sampled: Sampled, *, whole: bool, too_deep: bool = False
) -> ReplyFacts:
    """Return the facts of a message, which is None if the reply could not be read as one."""
    if message is None:
        return ReplyFacts(None, None, None, None, (), sampled, whole, too_deep)
    usage = message.get("usage")
    return ReplyFacts(
        reply=msgspec.json.encode(message),
        response_id=_text(message.get("id")),
        finish=_text(message.get("stop_reason")),
        usage=usage if isinstance(usage, dict) else None,
        tool_calls=_tool_calls(message),
        sampled=sampled,
        whole=whole,
        too_deep=too_deep,
        text=_words(message),
    )


def message_summary(message: Message) -> ReplySummary:
    """Return what was said so far; a tool's block counts once it is whole."""
    return ReplySummary(
        response_id=_text(message.get("id")), text=_words(message), tool_calls=_tool_calls(message)
    )


def _words(message: Message) -> str:
    return "".join(_text(block.get("text")) or "" for block in _blocks(message, "text"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _blocks(message: Message, kind: str) -> list[dict[str, Any]]:
    content = message.get("content")
    members = content if isinstance(content, list) else []
    return [m for m in members if isinstance(m, dict) and m.get("type") == kind]


def _tool_calls(message: Message) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(block.get("id")),
            name=str(block.get("name")),
            arguments=msgspec.json.encode(block.get("input")).decode(),
        )
        for block in _blocks(message, "tool_use")
        if PARTIAL_INPUT not in block
    )


class Renaming:
    """Put the client's name for the model back in place of the version's."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with the client's name from `request`, and the version's name."""
        self._model = own_name(request, served_name)
        self._members: dict[bytes, Member] = {}
        if self._model is not None:
            served = msgspec.json.encode(served_name)
            self._members[b"model"] = Member(opens=b'"', instead=bytes(self._model), only=served)

    def restore(self, payload: bytes) -> bytes:
        """Return the payload with the client's name; the same object if nothing changes."""
        model = self._model
        if model is None:
            return payload
        parsed = parse_object(payload)
        if parsed is None:
            return self.hide(payload)
        changed = _rename(parsed, model)
        inner = parse_object(bytes(parsed[ENVELOPE])) if ENVELOPE in parsed else None
        if inner is not None and _rename(inner, model):
            parsed[ENVELOPE] = msgspec.Raw(msgspec.json.encode(inner))
            changed = True
        return msgspec.json.encode(parsed) if changed else payload

    def hide(self, payload: bytes) -> bytes:
        """Return a payload that cannot be parsed with the version's name replaced."""
        return without(payload, self._members)


def _rename(holder: Object, model: msgspec.Raw) -> bool:
    if "model" not in holder:
        return False
    holder["model"] = model
    return True


class PlainReply:
    """Follow a message in one piece."""

    def __init__(self, renaming: Renaming) -> None:
        """Begin a reply in which `renaming` puts the model's name back."""
        self._renaming = renaming
        self._pieces: list[bytes] = []
        self._message: Message | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the whole reply with the client's name for the model."""
        out = self._renaming.restore(b"".join(self._pieces))
        self._message, self._whole = decoded_object(out), True
        return out

    @property
    def ended(self) -> bool:
        """Return whether the reply's end has come."""
        return self._whole

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls."""
        return message_summary(self._message or {})


class PlainReader(PlainReply):
    """Read a recorded message in one piece."""

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the message's facts, without token ids."""
        return message_facts(self._message, NOTHING_SAMPLED, whole=self._whole)


class PlainStream:
    """Follow a message as server-sent events, each of which names its type."""

    def __init__(self, renaming: Renaming) -> None:
        """Begin a stream in which `renaming` puts the model's name back."""
        self._renaming = renaming
        self._events = EventStream(self._data, renaming.hide, _is_end)
        self._message: Message = {}

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines that `chunk` completes, up to the event `message_stop`."""
        return self._events.feed(chunk)

    @property
    def at_end(self) -> bool:
        """Return whether the event `message_stop` has come whole."""
        return self._events.at_end

    def release(self) -> bytes:
        """Return the held back end of the stream."""
        return self._events.release()

    def finish(self) -> bytes:
        """Return the held back end of the stream, with any unfinished line."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """Return whether `message_stop` came."""
        return self._events.ended

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls so far."""
        return message_summary(self._message)

    def _data(self, payload: bytes) -> bytes:
        out = self._renaming.restore(payload)
        event = decoded_object(out)
        if event is None:
            raise Unread
        merge_message_event(self._message, event)
        return out


class PlainStreamReader(PlainStream):
    """Read the recorded events of a message."""

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the facts of the message that the events make, without token ids."""
        return message_facts(self._message or None, NOTHING_SAMPLED, whole=self._events.ended)


def _is_end(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name == b"event" and value.strip() == LAST_EVENT


NOT_A_CHUNK: Final = "The model server sent data that is not a chunk of a chat completion."


class WholeMessage:
    """Make a message of a chat completion in one piece, or of the error in its place."""

    def __init__(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> None:
        """Begin the reply to `request`, which comes with this HTTP `status`."""
        self._model = _asked_model(request, served_name)
        self._filter = ReplyFilter(request, served_name)
        self._status = status
        self._pieces: list[bytes] = []
        self._message: dict[str, Any] | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """Keep the bytes until the reply's end, and return none."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """Return the message, or the error in Anthropic's format.

        A reply that is neither is returned as it came, without ids.
        """
        body = b"".join(self._pieces)
        out = _translated(self._read(body), self._model) or _translated_error(body, self._status)
        if out is None:
            out = _translated(read_repaired(body), self._model) or self._filter.hide(body)
        self._message, self._whole = decoded_object(out), True
        return out

    def _read(self, body: bytes) -> ChatReply | None:
        return read_reply(body)

    @property
    def ended(self) -> bool:
        """Return whether the reply's end has come."""
        return self._whole

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls."""
        return message_summary(self._message or {})


class StreamedMessage:
    """Make a message's events of a chat completion's chunks, as they come."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        self._events = MessageEvents(_asked_model(request, served_name))
        self._message: dict[str, Any] = {}
        self._lines = Lines()
        # Data that is not a chunk by itself; it may be the first line of several.
        self._parts: list[bytes] = []
        self._held = b""
        self._ended = False
        self._failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the events of the lines that `chunk` completes."""
        return b"".join([self._line(line) for line in self._lines.feed(chunk)])

    @property
    def at_end(self) -> bool:
        """Return whether `[DONE]` has come."""
        return self._ended

    def release(self) -> bytes:
        """Return the last events, which were held back."""
        held, self._held = self._held, b""
        return held

    def finish(self) -> bytes:
        """Return the last events; an unfinished line is ignored unless it is `[DONE]`."""
        rest = self._lines.rest()
        if is_done(rest):
            self._line(rest)
        return self.release()

    def _line(self, line: bytes) -> bytes:
        line = line.removeprefix(BOM)
        if line.startswith(b":"):
            return line.rstrip(b"\r\n") + b"\n\n"
        if self._ended or self._failed:
            return b""
        if not line.startswith(b"data:"):
            return self._rest_of_event() if self._parts and not line.strip() else b""
        payload = line[5:].strip()
        if payload == DONE:
            self._ended = True
            self._held = self._say(self._events.stop())
            return b""
        chunk = None if self._parts else read_reply(payload)
        if chunk is None:
            self._parts.append(payload)
            return b""
        return self._chunk(chunk, payload)

    def _rest_of_event(self) -> bytes:
        payload, self._parts = b"\n".join(self._parts), []
        return self._chunk(read_reply(payload), payload)

    def _chunk(self, chunk: ChatReply | None, payload: bytes) -> bytes:
        if chunk is None or chunk.choices is None:
            self._failed = True
            return _error_event(decoded_object(payload) or {})
        return self._say(self._events.take(chunk))

    def _say(self, events: list[Event]) -> bytes:
        for event in events:
            merge_message_event(self._message, event)
        return b"".join(encode_event(event) for event in events)

    @property
    def ended(self) -> bool:
        """Return whether `[DONE]` came."""
        return self._ended

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls so far."""
        return message_summary(self._message)


def _translated(reply: ChatReply | None, model: str | None) -> bytes | None:
    if reply is None or not reply.choices or reply.choices[0].message is None:
        return None
    return msgspec.json.encode(whole_message(reply, reply.choices[0], model or reply.model))


def _asked_model(request: ModelRequest, served_name: str | None) -> str | None:
    name = value_of(own_name(request, served_name))
    return name if isinstance(name, str) else None


def _translated_error(body: bytes, status: int | None) -> bytes | None:
    """Return vLLM's error in Anthropic's format, with the type of its status there."""
    error = _error_of(decoded_object(body) or {})
    if error is None:
        return None
    if status not in ERROR_STATUSES:
        status = error.status
    return ANTHROPIC.body(error.message, error.kind, status=status)


def _error_event(payload: dict[str, Any]) -> bytes:
    error = _error_of(payload) or _Error(NOT_A_CHUNK, "", None)
    return ANTHROPIC.event(error.message, error.kind, status=error.status)


class _Error(msgspec.Struct, frozen=True):
    message: str
    kind: str
    status: int | None


def _error_of(payload: dict[str, Any]) -> _Error | None:
    """Return the error in a reply, in OpenAI's format or in that of vLLM before 0.10."""
    error = payload.get("error")
    if not isinstance(error, dict):
        error = payload if payload.get("object") == "error" else {}
    message, kind, code = error.get("message"), error.get("type"), error.get("code")
    if not isinstance(message, str):
        return None
    # vLLM's code is the HTTP status, OpenAI's is a word.
    return _Error(message, str(kind), code if type(code) is int else None)


class WholeMessageReader(WholeMessage):
    """Read a chat completion in one piece as the message that it became."""

    def __init__(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> None:
        """Begin the reply to `request`, which came with this HTTP `status`."""
        super().__init__(request, served_name, status=status)
        self._tokens = ChatTokens()

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def _read(self, body: bytes) -> ChatReply | None:
        reply = super()._read(body)
        if reply is not None:
            self._tokens.take(reply)
        return reply

    def facts(self) -> ReplyFacts:
        """Return the message's facts, with the completion's token data."""
        return message_facts(
            self._message,
            self._tokens.sampled(),
            whole=self._whole,
            too_deep=_arguments_nest_too_deep(b"".join(self._pieces)),
        )


class StreamedMessageReader(StreamedMessage):
    """Read a chat completion's chunks as the message that they became."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        super().__init__(request, served_name)
        self._tokens = ChatTokens()

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def _chunk(self, chunk: ChatReply | None, payload: bytes) -> bytes:
        if chunk is not None and chunk.choices is not None:
            self._tokens.take(chunk)
        return super()._chunk(chunk, payload)

    def facts(self) -> ReplyFacts:
        """Return the facts of the message that the events make, with the chunks' token data."""
        sampled = self._tokens.sampled()
        return message_facts(self._message or None, sampled, whole=self._ended)


def _arguments_nest_too_deep(raw: bytes) -> bool:
    """Return whether a chat's reply that became a message has arguments that nest too deep.

    A tool call's arguments are text in a chat, and a structure in a message.
    """
    if most_of(raw).containers <= MAX_DEPTH:
        return False
    reply = read_reply(raw)
    messages = [choice.message for choice in (reply.choices or ())] if reply is not None else []
    calls = [call for message in messages if message for call in message.tool_calls or ()]
    return any(
        nests_too_deep((call.function.arguments or "").encode(errors="surrogatepass"))
        for call in calls
    )
