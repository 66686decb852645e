"""Turn chat completions into Anthropic's messages, or forward messages as they are (pure).

The events are those that vLLM makes of its own chat completions for `/v1/messages`
(`vllm/entrypoints/anthropic/serving.py`), as https://docs.anthropic.com/en/api/messages-streaming
defines them. vLLM draws signatures at random; here they are derived from the reply's id.
"""

import json
import re
from hashlib import sha256
from typing import Any, Final

import msgspec

from proxy.formats.base import (
    BOM,
    BOMS,
    DATA,
    DONE,
    EVENT,
    NOTHING_SAMPLED,
    ReplyFacts,
    ReplyParser,
    ReplySummary,
    SampledTokens,
    UnreadableEvent,
)
from proxy.formats.choices import (
    FunctionPiece,
    Logprobs,
    TextPieces,
    append_text,
    join_pieces,
    members_added_by,
)
from proxy.formats.conversation import blocks_of
from proxy.formats.errors import ANTHROPIC, ERROR_STATUSES
from proxy.formats.raw_json import (
    UNREADABLE,
    Replacement,
    TokenId,
    decoded_object,
    parse_object,
    string_or_none,
)
from store.records import ToolCall
from store.values.documents import MAX_DEPTH, nests_too_deep, size_bound

_encode: Final = msgspec.json.Encoder().encode
Message = dict[str, Any]
Event = dict[str, Any]


class MessagesReply(ReplyParser):
    """Parser of a reply that results in a message; subclasses translate or forward it."""

    # Whether a reply in one piece could be read as a message.
    _is_message = False

    def begin(self) -> None:
        # The message so far.
        self._message: Message = {}

    def summary(self) -> ReplySummary:
        """Return the message's text and tool calls so far; a tool call counts once it is whole."""
        message = join_pieces(self._message)
        return ReplySummary(
            response_id=string_or_none(message.get("id")),
            text=_text_of(message),
            tool_calls=_tool_calls_of(message),
        )

    def facts(self) -> ReplyFacts:
        message, too_deep = join_pieces(self._message), self._is_too_deep()
        if not (message or self._is_message):
            return ReplyFacts(None, None, None, None, (), self._sampled(), too_deep)
        usage = message.get("usage")
        return ReplyFacts(
            reply=_encode(message),
            response_id=string_or_none(message.get("id")),
            finish=string_or_none(message.get("stop_reason")),
            usage=usage if isinstance(usage, dict) else None,
            tool_calls=_tool_calls_of(message),
            sampled=self._sampled(),
            too_deep=too_deep,
            text=_text_of(message),
        )

    def _keep_message(self, out: bytes) -> None:
        message = decoded_object(out)
        if message is not None:
            self._message, self._is_message = message, True

    def _sampled(self) -> SampledTokens:
        return NOTHING_SAMPLED

    def _is_too_deep(self) -> bool:
        """Return whether a JSON string that becomes an object for the client nests too deep.

        Such a reply is passed on, and the call recorded without it (`nested_too_deep`). Only
        translation from a chat turns strings into objects: a tool call's arguments.
        """
        return False


class ForwardedReply(MessagesReply):
    """Parser of a reply that is a message already: it is recorded, and not trainable.

    The client's name for the model is put back at the top level, and in the `message` of a stream's
    first event.
    """

    @property
    def ended(self) -> bool:
        """Return whether the message's end has come, even if an event could not be read."""
        return self._end_seen

    def client_reply(self, body: bytes) -> bytes:
        """Return the reply with the client's name for the model."""
        out = self._rename_model(body)
        self._keep_message(out)
        return out

    def client_event(self, data: bytes) -> bytes:
        """Return an event's data with the client's name for the model."""
        out = self._rename_model(data)
        event = decoded_object(out)
        if event is None:
            raise UnreadableEvent
        _merge_event(self._message, event)
        self.gathered += len(data)
        return out

    def is_end(self, line: bytes) -> bool:
        """Return whether a line names the event `message_stop`."""
        return line.startswith(EVENT) and line[len(EVENT) :].strip() == b"message_stop"

    def _rename_model(self, data: bytes) -> bytes:
        if self._model is None:
            return data
        parsed = parse_object(data)
        if parsed is None:
            return self.hide_added_members(data)
        changed = "model" in parsed
        if changed:
            parsed["model"] = self._model
        inner = parse_object(bytes(parsed["message"])) if "message" in parsed else None
        if inner is not None and "model" in inner:
            inner["model"] = self._model
            parsed["message"] = msgspec.Raw(_encode(inner))
            changed = True
        return _encode(parsed) if changed else data


class TranslatedReply(MessagesReply):
    """Parser that translates a chat completion, its chunks, or an error to Anthropic's form."""

    _is_done = False
    _failed = False
    # Token data, and the bytes of a reply in one piece.
    _prompt_ids: list[int] | None = None
    _ids: list[int] | None = None
    _logprobs: list[float] | None = None
    _completion_tokens: int | None = None
    _body = b""

    def begin(self) -> None:
        super().begin()
        # The client's name for the model, if another was put in its place.
        self._asked_model = None if self._model is None else self._request.model
        if self._streamed:
            self._events = _EventTranslator(self._asked_model)
            # Data lines so far of a chunk that spans several lines.
            self._chunk_lines = bytearray()

    def client_reply(self, body: bytes) -> bytes:
        """Return the translated message or error.

        A reply that cannot be translated keeps its form; token ids and log-probabilities that only
        Pawl asked for are removed, and the client's name for the model is put back.
        """
        reply = _parse_chat(body)
        if self._reading and reply is not None:
            self._body = body
            self._take_tokens(reply)
        out = self._translate(reply) or _translated_error(body, self._status)
        if out is None:
            # U+FFFD stands for each lone surrogate and each byte that is not UTF-8.
            text = body.decode(errors="replace").encode()
            text = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], text)
            out = self._translate(_parse_chat(text)) or self.hide_added_members(body)
        self._keep_message(out)
        return out

    def _translate(self, reply: "_Chat | None") -> bytes | None:
        if reply is None or not reply.choices or reply.choices[0].message is None:
            return None
        message = _whole_message(reply, reply.choices[0], self._asked_model or reply.model)
        return _encode(message)

    def added_members(self, data: bytes) -> dict[bytes, Replacement]:
        return members_added_by(self._request)

    def is_end(self, line: bytes) -> bool:
        """Return whether a line is `[DONE]`; always False after an unreadable chunk."""
        return DONE in line and not self._failed and super().is_end(line.removeprefix(BOM))

    def _pass_line(self, line: bytes) -> bytes:
        if not line.startswith(DATA):
            return self._pass_other(line) if self._chunk_lines or len(line) > 1 else b""
        if self._is_done or self._failed:
            return b""
        data = line[5:].strip()
        if data == DONE:
            self._is_done = self.at_end = True
            return self._encode_events(self._events.end_events())
        chunk = None if self._chunk_lines else _parse_chat(data)
        if chunk is None:
            self._chunk_lines += data + b"\n"
            return b""
        return self._translate_chunk(chunk, data)

    def _unfinished(self, rest: bytes) -> bytes:
        """Return the last events if the cut-off line is `[DONE]`, else nothing."""
        return self._pass_line(rest) if self.is_end(rest) else b""

    def _pass_other(self, line: bytes) -> bytes:
        if boms := BOMS.match(line):
            return self._pass_line(line[boms.end() :])
        if not self._chunk_lines or self._failed or self._is_done or line.strip():
            return self._pass_comments(line)
        data = bytes(self._chunk_lines[:-1])
        self._chunk_lines.clear()
        return self._translate_chunk(_parse_chat(data), data)

    def _awaits_blank(self) -> bool:
        return bool(self._chunk_lines)

    def _pass_comments(self, run: bytes) -> bytes:
        return b"".join([line + b"\n\n" for line in run.splitlines() if line.startswith(b":")])

    @property
    def waiting_bytes(self) -> int:
        """Return how much is buffered, including lines of a chunk and text held back by a tool."""
        return super().waiting_bytes + len(self._chunk_lines) + self._events.waiting

    def _pass_long_line(self, data: bytes) -> bytes:
        """Return an error event: a line too long to buffer cannot be translated."""
        self._chunk_lines.clear()
        return b"" if self._failed or self._is_done else self._translate_chunk(None, b"")

    def forget(self) -> None:
        """Drop the message so far; later chunks are still translated."""
        self.gathered, self._message = 0, {}
        self._events.forget()

    def _translate_chunk(self, chunk: "_Chat | None", data: bytes) -> bytes:
        if chunk is None or chunk.choices is None:
            self._failed = True
            error = _error_of(decoded_object(data) or {}) or (_NOT_A_CHUNK, "", None)
            return ANTHROPIC.event(error[0], error[1], status=error[2])
        if self._reading:
            self._take_tokens(chunk)
        return self._encode_events(self._events.events_of(chunk))

    def _encode_events(self, events: list[Event]) -> bytes:
        encoded = []
        for event in events:
            _merge_event(self._message, event)
            encoded += [b"event: ", event["type"].encode(), b"\ndata: ", _encode(event), b"\n\n"]
        self.gathered += sum(map(len, encoded))
        return b"".join(encoded)

    def _take_tokens(self, reply: "_Chat") -> None:
        """Gather the token data of a completion, or of a chunk of one."""
        if reply.prompt_token_ids is not None:
            self._prompt_ids = reply.prompt_token_ids
        if reply.usage is not None:
            self._completion_tokens = reply.usage.completion_tokens
        for choice in reply.choices or ():
            if choice.token_ids is not None:
                self._ids = self._ids or []
                self._ids += choice.token_ids
            if choice.logprobs is not None:
                self._logprobs = self._logprobs or []
                self._logprobs += [token.logprob for token in choice.logprobs.content or ()]

    def _sampled(self) -> SampledTokens:
        return SampledTokens(
            prompt_ids=None if self._prompt_ids is None else tuple(self._prompt_ids),
            sampled_ids=None if self._ids is None else tuple(self._ids),
            sampled_logprobs=None if self._logprobs is None else tuple(self._logprobs),
            choices=1,
            completion_tokens=self._completion_tokens,
        )

    def _is_too_deep(self) -> bool:
        """Return whether a tool call's arguments, which a chat has as text, nest too deep."""
        if size_bound(self._body).containers <= MAX_DEPTH:
            return False
        reply = _parse_chat(self._body)
        messages = [choice.message for choice in (reply.choices or ())] if reply is not None else []
        calls = [call for message in messages if message for call in message.tool_calls or ()]
        return any(
            nests_too_deep((call.function.arguments or "").encode(errors="surrogatepass"))
            for call in calls
        )


_NOT_A_CHUNK: Final = "The model server sent data that is not a chunk of a chat completion."
# An escape in a string; the group matches a lone surrogate.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def _parse_chat(data: bytes) -> "_Chat | None":
    """Parse a chat completion or a chunk of one; return None if `data` is neither."""
    try:
        return _chat_reply.decode(data)
    except UNREADABLE:
        return None


def _translated_error(body: bytes, status: int | None) -> bytes | None:
    """Return the error in `body` in Anthropic's format, or None if it has none."""
    error = _error_of(decoded_object(body) or {})
    if error is None:
        return None
    message, kind, code = error
    return ANTHROPIC.body(message, kind, status=status if status in ERROR_STATUSES else code)


def _error_of(payload: dict[str, Any]) -> tuple[str, str, int | None] | None:
    """Return the message, type and HTTP status of the error in a reply, or None if it has none.

    The status is None if the error names none. The error may have OpenAI's format, or that of vLLM
    before 0.10.
    """
    error = payload.get("error")
    if not isinstance(error, dict):
        error = payload if payload.get("object") == "error" else {}
    message, kind, code = error.get("message"), error.get("type"), error.get("code")
    if not isinstance(message, str):
        return None
    # vLLM's code is the HTTP status, OpenAI's is a word.
    return message, str(kind), code if type(code) is int else None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: FunctionPiece = msgspec.field(default_factory=FunctionPiece)


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    """Only choice of a chat completion (with `message`) or of a chunk (with `delta`)."""

    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None


class _Details(msgspec.Struct):
    """Numbers of prompt tokens that were read from a cache and written to it."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chat(msgspec.Struct):
    """Chat completion, chunk of one, or error instead of either."""

    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[TokenId] | None = None
    error: Any = None


_chat_reply: Final = msgspec.json.Decoder(_Chat)
_NO_MESSAGE: Final = _Message()


def _usage_of(usage: _Usage | None) -> dict[str, int]:
    """Return the usage in Anthropic's form, whose input excludes cached tokens, unlike OpenAI's."""
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


def _stop_reason(
    finish: str | None, stop: int | str | None, *, tool_used: bool, tool_complete: bool
) -> tuple[str | None, str | None]:
    """Return a message's `stop_reason` and `stop_sequence`.

    If a stop string cut a tool call short, the reason is `stop_sequence` and not `tool_use`: half a
    call must not be run.

    Args:
        finish: the completion's `finish_reason`.
        stop: the string or token that stopped the completion, if any.
        tool_used: the reply calls a tool.
        tool_complete: the reply calls a tool, and its last call's arguments are whole.
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


def _signature_of(reply_id: str | None, index: int) -> str:
    """Return a signature for a thinking block; clients send it back, and nobody verifies it."""
    return sha256(f"{reply_id}/{index}".encode()).hexdigest()[:32]


def _whole_message(reply: _Chat, choice: _Choice, model: str | None) -> dict[str, Any]:
    """Return a chat completion in one piece, translated to Anthropic's message."""
    answer = choice.message or _NO_MESSAGE
    calls = answer.tool_calls or []
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        signature = _signature_of(reply.id, 0)
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    content += [_tool_use(call) for call in calls]
    reason, sequence = _stop_reason(
        choice.finish_reason, choice.stop_reason, tool_used=bool(calls), tool_complete=bool(calls)
    )
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    return (
        {"id": reply.id, "type": "message", "role": "assistant"}
        | {"content": content or [{"type": "text", "text": ""}], "model": model}
        | {name: value for name, value in ended.items() if value is not None}
        | {"usage": _usage_of(reply.usage)}
    )


def _tool_use(call: _ToolCall) -> dict[str, Any]:
    block = {"type": "tool_use", "id": call.id, "name": call.function.name}
    return block | {"input": _input_json(call.function.arguments or "")}


def _input_json(arguments: str) -> msgspec.Raw:
    """Return a call's arguments, encoded as by vLLM, or `{}` if they are not a JSON object."""
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


class _EventTranslator:
    """Translator of chunks to Anthropic's events; `model`, if given, replaces their model name."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._id: str | None = None
        self._started = False
        self._index = 0
        self._open_block: str | None = None
        self._open_tool: str | None = None
        self._tool_ids: dict[int, str] = {}
        # The pieces of the last tool call's arguments (None before the first call), and whether
        # they are whole (None: not known).
        self._arguments: list[str] | None = None
        self._is_whole: bool | None = None
        # Text within a tool's block waits for the block's end.
        self._waiting: list[str] = []
        self.waiting = 0
        self._finish: str | None = None
        self._stopped_by: int | str | None = None

    def forget(self) -> None:
        """Drop the arguments of the last tool call so far."""
        if self._arguments is not None:
            self._arguments, self._is_whole = [], None

    def events_of(self, chunk: _Chat) -> list[Event]:
        """Return the events for a chunk.

        The first chunk only opens the message; a later one without choices ends it.
        """
        if not self._started:
            return [self._start(chunk)]
        if not chunk.choices:
            return [*self._close(), self._end(chunk.usage)]
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._finish, self._stopped_by = choice.finish_reason, choice.stop_reason
        return self._message_events(choice.delta or _NO_MESSAGE)

    def end_events(self) -> list[Event]:
        """Return the events that end the open block, if any, and the message."""
        return [*self._close(), {"type": "message_stop"}]

    def _start(self, chunk: _Chat) -> Event:
        self._started, self._id = True, chunk.id
        message: Event = {"id": chunk.id, "type": "message", "role": "assistant", "content": []}
        message |= {"model": self._model or chunk.model, "stop_reason": None}
        message |= {"stop_sequence": None, "usage": _usage_of(chunk.usage)}
        return {"type": "message_start", "message": message}

    def _end(self, usage: _Usage | None) -> Event:
        if self._is_whole is None:
            self._is_whole = self._arguments is not None and _is_json("".join(self._arguments))
        reason, sequence = _stop_reason(
            self._finish or "stop",
            self._stopped_by,
            tool_used=self._arguments is not None,
            tool_complete=self._is_whole,
        )
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return {"type": "message_delta", "delta": delta, "usage": _usage_of(usage)}

    def _message_events(self, delta: _Message) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._text_events("thinking", delta.reasoning)
        if delta.content and self._open_block == "tool_use":
            self._waiting.append(delta.content)
            self.waiting += len(delta.content.encode("utf-8", "surrogatepass"))
        elif delta.content:
            events += self._text_events("text", delta.content)
        for call in delta.tool_calls or ():
            events += self._tool_call_events(call)
        return events

    def _text_events(self, kind: str, text: str) -> list[Event]:
        """Return the events for a piece of text or thinking; open a block of its kind if needed."""
        events = [] if self._open_block == kind else [*self._close(), self._block(kind, {kind: ""})]
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _tool_call_events(self, call: _ToolCall) -> list[Event]:
        events: list[Event] = []
        name, arguments = call.function.name, call.function.arguments
        if call.id is not None:
            self._tool_ids[call.index] = call.id
            if self._open_tool != call.id and name is not None:
                tool_use = {"id": call.id, "name": name, "input": {}}
                events = [*self._close(), self._block("tool_use", tool_use)]
                self._open_tool, self._arguments, self._is_whole = call.id, [], None
        running = self._open_tool is not None and self._open_tool == self._tool_ids.get(call.index)
        if arguments and running and self._arguments is not None:
            self._arguments.append(arguments)
            self._is_whole = None
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _block(self, kind: str, content: dict[str, Any]) -> Event:
        self._open_block = kind
        block = {"type": kind} | content
        return {"type": "content_block_start", "content_block": block, "index": self._index}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "delta": delta, "index": self._index}

    def _close(self) -> list[Event]:
        """Return the events that end the open block, then those of text that waited for its end."""
        waiting, self._waiting, self.waiting = "".join(self._waiting), [], 0
        events = self._end_block()
        if waiting:
            events += [*self._text_events("text", waiting), *self._end_block()]
        return events

    def _end_block(self) -> list[Event]:
        if self._open_block is None:
            return []
        events: list[Event] = []
        if self._open_block == "thinking":
            signature = _signature_of(self._id, self._index)
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        events.append({"type": "content_block_stop", "index": self._index})
        self._index += 1
        self._open_block = self._open_tool = None
        return events


# The field of a block where a tool's input is gathered until the block ends.
_PARTIAL_INPUT: Final = "_input"
# By a delta's type: its field, and the block's field that it is appended to.
_BLOCK_DELTAS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", _PARTIAL_INPUT),
}


def _merge_event(message: Message, event: Event) -> None:
    """Add an event of Anthropic's stream to `message`, in place; ignore a malformed event."""
    kind, index = event.get("type"), event.get("index")
    if kind in ("content_block_delta", "content_block_stop"):
        content = message.get("content")
        if isinstance(content, list) and isinstance(index, int) and 0 <= index < len(content):
            _merge_block(content[index], event.get("delta"), stop=kind == "content_block_stop")
    elif kind == "message_start" and isinstance(event.get("message"), dict):
        message |= event["message"] | {"content": []}
    elif kind == "message_delta":
        for part in ("delta", "usage"):
            values = event.get(part)
            target = message if part == "delta" else message.setdefault("usage", {})
            if isinstance(values, dict) and isinstance(target, dict):
                target |= values
    elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
        content = message.setdefault("content", [])
        if isinstance(content, list):
            content.append(dict(event["content_block"]))


def _merge_block(block: Any, delta: Any, *, stop: bool) -> None:
    """Append a delta to a block; at the block's end, parse a tool's input, JSON in pieces."""
    if not isinstance(block, dict):
        return
    if stop and _PARTIAL_INPUT in block:
        block["input"] = _parsed_input("".join(block.pop(_PARTIAL_INPUT)))
    if isinstance(delta, dict) and delta.get("type") in _BLOCK_DELTAS:
        source, target = _BLOCK_DELTAS[delta["type"]]
        if isinstance(delta.get(source), str):
            if not isinstance(block.get(target), TextPieces):
                block[target] = str(block.get(target) or "")
            append_text(block, target, delta[source])


def _parsed_input(text: str) -> Any:
    """Parse a tool's input; return text that is not JSON as it is, too deep JSON unparsed."""
    encoded = text.encode(errors="surrogatepass")
    if nests_too_deep(encoded):
        return msgspec.Raw(encoded)
    try:
        return msgspec.json.decode(encoded) if encoded else {}
    except UNREADABLE:
        return text


def _text_of(message: Message) -> str:
    texts = (block.get("text") for block in blocks_of(message.get("content"), "text"))
    return "".join(string_or_none(text) or "" for text in texts)


def _tool_calls_of(message: Message) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(block.get("id")),
            name=str(block.get("name")),
            arguments=_encode(block.get("input")).decode(),
        )
        for block in blocks_of(message.get("content"), "tool_use")
        if _PARTIAL_INPUT not in block
    )
